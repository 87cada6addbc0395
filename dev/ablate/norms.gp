# Root mean square of the values of W_q, W_k, W_v and of the effective scale vectors, over layers and seeds.
load scripts.'/style.gp'
png = "set terminal pngcairo noenhanced size 1200,760 font 'DejaVu Sans,12' background '#ffffff'; set output name.'.png'"
svg = "set terminal svg noenhanced size 1200,760 font 'DejaVu Sans,12' background '#ffffff'; set output name.'.svg'"
array what[5] = ["W_q", "W_k", "W_v", "scale vectors of Input-Norms", "scale vectors of Output-Norms"]
set xlabel tokens_label
set ylabel "root mean square"
unset key
do for [terminal_command in "png svg"] {
    eval(value(terminal_command))
    set multiplot layout 2,3 title title_text.where.": norms over training, over all layers and seeds"
    do for [k=1:5] {
        if (kinds[k:k] eq "1") {
            set title what[k]
            plot for [i=1:rows] data index i-1 using ($1/1e3):(column(k+1)) with linespoints lc rgb colour[i] lw 2 pt mark[i] ps 0.6
        } else { set multiplot next }
    }
    # the last panel is the legend
    unset title; unset xlabel; unset ylabel; unset border; unset tics; unset grid
    set key inside center center samplen 3 spacing 1.5
    set xrange [0:1]; set yrange [0:1]
    plot for [i=1:rows] NaN with linespoints lc rgb colour[i] lw 2 pt mark[i] title row_name(i)
    unset multiplot
    unset key
    set xrange [*:*]; set yrange [*:*]
    set border 3 lc rgb "#555555"; set tics nomirror out; set grid lc rgb "#dddddd" lt 1 lw 1
    set xlabel tokens_label; set ylabel "root mean square"
}
