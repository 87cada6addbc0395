# Last loss against parameters that a token uses.
load scripts.'/style.gp'
set title title_text."\nlast loss by size; bar: standard error over seeds"
set xlabel "parameters that a token uses (thousands)"
set ylabel "loss (nats a token)"
set logscale x 2
do for [terminal_command in "png svg"] {
    eval(value(terminal_command))
    # ticks at the sizes of the first row: those of the others differ by their scale vectors alone
    plot data index 0 using ($1/1e3):2:3:4:xtic(sprintf("%.0f", $1/1e3)) with yerrorlines lc rgb colour[1] lw 2 pt mark[1] ps 0.9 title row_name(1), \
         for [i=2:rows] data index i-1 using ($1/1e3):2:3:4 with yerrorlines lc rgb colour[i] lw 2 pt mark[i] ps 0.9 title row_name(i)
}
