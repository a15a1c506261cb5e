"""Sphinx: one site from these pages, the gallery in ../examples and the docstrings.

`make docs` builds it.
"""

import sys
import warnings
from importlib.metadata import version as installed_version
from pathlib import Path

import lsrdecomp

# numpydoc reads docstrings of what a module imports, before autodoc leaves them out.
warnings.filterwarnings("ignore", message="Unknown section", module="numpydoc")
sys.path[:0] = [str(Path(__file__).parent / "_extensions"), str(Path(__file__).parents[1])]

project = "lsrdecomp"
author = "the lsrdecomp founders"
copyright = "2026, the lsrdecomp founders"
release = installed_version("lsrdecomp")
version = release

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",  # a page for each public name, from the rooms' faces
    "sphinx.ext.viewcode",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # formulas are readable without a network
    "numpydoc",
    "myst_parser",
    "sphinx_design",  # the cards of the front page
    "sphinx_gallery.gen_gallery",
    "shell",
    "results",
    "public_names",
    "box_ends",
    "cards",
]
exclude_patterns = ["_build", "_extensions", "conftest.py"]
root_doc = "index"
language = "en"
nitpicky = False
default_role = "py:obj"  # `decompose` in a docstring leads to its page
templates_path = ["_templates"]
autosummary_imported_members = True
autosummary_ignore_module_all = False
autosummary_context = {"at_the_top": lsrdecomp.__all__}  # documented once, under their short names

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist", "substitution"]
myst_substitutions = {"version": release}
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature carries them already
autodoc_class_signature = "mixed"
numpydoc_show_class_members = False
numpydoc_xref_param_type = False

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "auto_examples",
    "filename_pattern": r"plot_",
    "ignore_pattern": r"^(?!plot_)",  # other programs in that folder are not pictures
    "within_subsection_order": "gallery_order.Order",
    "remove_config_comments": True,
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": 1e9,
    "download_all_examples": False,
    "abort_on_example_error": True,
    "write_computation_times": False,
}

html_theme = "pydata_sphinx_theme"
html_title = "lsrdecomp"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/mark.svg"
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {
        "text": "lsrdecomp",
        "image_light": "_static/mark.svg",
        "image_dark": "_static/mark.svg",
    },
    "navigation_with_keys": False,
    "show_prev_next": False,
    "header_links_before_dropdown": 5,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "monokai",
}
html_sidebars = {"index": []}  # every other page has its section beside it
