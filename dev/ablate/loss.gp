# Validation loss against tokens: the mean of the seeds, and a band from the least to the greatest.
load scripts.'/style.gp'
set title title_text.where."\nvalidation loss; line: mean of the seeds, band: all seeds"
set xlabel tokens_label
set ylabel "loss (nats a token)"
# the first points, far above the rest, would press all curves together
stats data using 2 nooutput
low = STATS_min; high = STATS_median
if (high > low) { set yrange [low - 0.06 * (high - low):low + 1.8 * (high - low)] }
do for [terminal_command in "png svg"] {
    eval(value(terminal_command))
    plot for [i=1:rows] data index i-1 using ($1/1e3):3:4 with filledcurves fc rgb colour[i] fs transparent solid 0.18 noborder, \
         for [i=1:rows] data index i-1 using ($1/1e3):2 with linespoints lc rgb colour[i] lw 2 pt mark[i] ps 0.8 title row_name(i)
}
