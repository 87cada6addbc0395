# Last loss against the values of the sweep; bars: standard error of the mean.
load scripts.'/style.gp'
set title title_text."\nlast loss by --".flag."; bar: standard error over seeds"
set xlabel "--".flag.(flag eq "lr" ? " (peak learning rate)" : "")
set ylabel "loss (nats a token)"
stats data using 1 nooutput
if (STATS_min > 0) { set logscale x 2; set format x "%g"; set xrange [STATS_min/1.2:STATS_max*1.2] }
do for [terminal_command in "png svg"] {
    eval(value(terminal_command))
    plot for [i=1:rows] data index i-1 using 1:2:3:4 with yerrorlines lc rgb colour[i] lw 2 pt mark[i] ps 0.9 title row_name(i)
}
