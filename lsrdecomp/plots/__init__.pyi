# Read by type checkers, and by `__init__.py`, which loads a name when it is first used.
from .pictures import COLOURS as COLOURS
from .pictures import plot_error_curves as plot_error_curves
from .pictures import plot_layer_grid as plot_layer_grid
from .pictures import plot_pareto as plot_pareto
from .pictures import plot_shares as plot_shares
from .pictures import plot_spectra as plot_spectra
from .pictures import plot_sweeps as plot_sweeps
from .pictures import save_figure as save_figure
