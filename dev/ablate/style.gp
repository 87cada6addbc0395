# The one style of all figures. Colours: Okabe and Ito's, which colour-blind readers can tell apart, without yellow (too
# pale on white); each also has its own point mark. Every script is called with scripts, data, name, title_text, baseline,
# rows, bars, setting, flag set, and draws itself twice: PNG and SVG.
array colour[7] = ["#000000", "#D55E00", "#0072B2", "#009E73", "#E69F00", "#56B4E9", "#CC79A7"]
array mark[7] = [7, 5, 9, 11, 13, 6, 4]
png = "set terminal pngcairo noenhanced size 960,600 font 'DejaVu Sans,13' background '#ffffff'; set output name.'.png'"
svg = "set terminal svg noenhanced size 960,600 font 'DejaVu Sans,13' background '#ffffff'; set output name.'.svg'"
set encoding utf8
set border 3 lc rgb "#555555"
set tics nomirror out
set grid lc rgb "#dddddd" lt 1 lw 1
set key outside right center samplen 2 spacing 1.3 noautotitle
set lmargin 11
set autoscale xfix
set datafile missing "NaN"
where = setting eq '' ? '' : '  ('.setting.')'
tokens_label = "tokens trained on (thousands)"
row_name(i) = system(sprintf("grep '^\"' '%s' | sed -n '%dp' | tr -d '\"'", data, i))
