# Last loss against parameters that a token uses.
load scripts.'/style.gp'
set title title_text."\nlast loss by size; bar: standard error over seeds"
set xlabel "parameters that a token uses (thousands)"
set ylabel "loss (nats a token)"
set logscale x 2
set format x "%g"
do for [terminal_command in "png svg"] {
    eval(value(terminal_command))
    plot for [i=1:rows] data index i-1 using ($1/1e3):2:3:4 with yerrorlines lc rgb colour[i] lw 2 pt mark[i] ps 0.9 title row_name(i)
}
