# Loss less the baseline's against tokens, as in the paper's figure 5, in pairs by seed; band: 95% confidence interval.
load scripts.'/style.gp'
set title title_text.where."\nloss less that of ".baseline." (paired by seed); band: 95% confidence interval of the mean"
set xlabel tokens_label
set ylabel "difference of losses (nats a token)"
set format y "%+.3f"
set xzeroaxis lw 2 lc rgb "#000000"
# the second half decides: the beginning may be far off
stats data using 1 nooutput
last = STATS_max
stats data using ($1 > 0.3 * last ? $3 : NaN) nooutput
low = STATS_min
stats data using ($1 > 0.3 * last ? $4 : NaN) nooutput
high = STATS_max
if (high > low) { set yrange [low - 0.1 * (high - low):high + 0.1 * (high - low)] }
do for [terminal_command in "png svg"] {
    eval(value(terminal_command))
    plot for [i=1:rows] data index i-1 using ($1/1e3):3:4 with filledcurves fc rgb colour[i] fs transparent solid 0.15 noborder, \
         for [i=1:rows] data index i-1 using ($1/1e3):2 with linespoints lc rgb colour[i] lw 2 pt mark[i] ps 0.8 title row_name(i)
}
