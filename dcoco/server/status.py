"""The page at `/`: what is served, filled in here, and its load, which the page asks /status.json for every second."""

from html import escape
from importlib.resources import files
from string import Template

from dcoco.engine import Engine


def render_status(engine: Engine, model: str) -> str:
    """The page as HTML."""
    page = Template(files("dcoco.server").joinpath("status.html").read_text(encoding="utf-8"))
    return page.substitute(
        model=escape(model),
        method=engine.batch.method,
        dtype=str(engine.target.dtype).removeprefix("torch."),
        rows=engine.max_num_seqs,
        length=engine.max_model_len,
    )
