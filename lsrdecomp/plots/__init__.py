"""Pictures of what `analysis` computed; needs matplotlib when one is drawn, not before."""

from lsrdecomp.plots.pictures import COLOURS as COLOURS
from lsrdecomp.plots.pictures import available as available
from lsrdecomp.plots.pictures import plot_error_curves as plot_error_curves
from lsrdecomp.plots.pictures import plot_layer_grid as plot_layer_grid
from lsrdecomp.plots.pictures import plot_pareto as plot_pareto
from lsrdecomp.plots.pictures import plot_spectra as plot_spectra
from lsrdecomp.plots.pictures import plot_sweeps as plot_sweeps
from lsrdecomp.plots.pictures import save_figure as save_figure
from lsrdecomp.plots.quality import Point as Point
from lsrdecomp.plots.quality import plot_quality as plot_quality
from lsrdecomp.plots.quality import plot_stages as plot_stages
