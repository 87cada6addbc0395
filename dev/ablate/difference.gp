# The last loss of every row less the baseline's, with its 95% confidence interval.
load scripts.'/style.gp'
set title title_text.where."\nlast loss less that of ".baseline." (paired by seed); bar: 95% confidence interval\nblue: better, orange: worse, grey: open"
set xlabel "difference of losses (nats a token); left of 0: better than ".baseline
set format x "%g"
set yrange [bars - 0.5:-0.5]
set autoscale x
set grid noytics
unset key
set lmargin 26
set arrow from 0, graph 0 to 0, graph 1 nohead lw 2 lc rgb "#000000"
shade(low, high) = high < 0 ? 0x0072B2 : low > 0 ? 0xD55E00 : 0x777777
do for [terminal_command in "png svg"] {
    eval(value(terminal_command))
    plot data using 2:0:3:4:(shade($3, $4)):ytic(1) with xerrorbars lc rgb variable lw 2 pt 7 ps 1.1
}
