"""Configuration of Sphinx for the documentation site, which `scripts/docs` builds."""

import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import treadle  # noqa: E402

project = "Treadle"
author = "The Treadle authors"
copyright = author
version = release = treadle.__version__

extensions = [
    "myst_nb",  # MyST, and notebooks
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",  # the reference links to highlighted sources inside the site
    "sphinx_copybutton",
    "extension",
]
exclude_patterns = ["site"]  # extension.py adds the pages that navigation.toml excludes
# The anchors of headings are those that GitHub makes, down to the level that pages use.
myst_heading_anchors = 4
default_role = "code"

# Notebooks are texts in docs/notebooks; the site shows what they print when it is built.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

# Kernels read no configuration of the user. They warn that they talk over TCP on this machine,
# without encryption, which here shows nothing that the site does not.
kernels = tempfile.TemporaryDirectory(prefix="treadle-docs-")
os.environ["IPYTHONDIR"] = kernels.name
profile = Path(kernels.name) / "profile_default"
profile.mkdir()
(profile / "ipython_kernel_config.py").write_text("get_config().IPKernelApp.log_level = 'ERROR'\n")

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"Treadle {release}"
html_static_path = ["static"]
html_favicon = "static/favicon.svg"
html_css_files = ["site.css"]
html_search_scorer = str(HERE / "static/scorer.js")
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fc4", "color-brand-content": "#1f5fc4"},
    "dark_css_variables": {"color-brand-primary": "#7fb0ff", "color-brand-content": "#7fb0ff"},
}
pygments_style = "friendly"
pygments_dark_style = "github-dark"

# Prompts and outputs are not copied.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
