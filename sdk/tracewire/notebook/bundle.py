"""The widget's JavaScript and its styles as one ES module, put together from the dashboard's modules.

Front ends load a widget from one text, and a notebook may be offline. So the text has everything: uPlot, the style
sheets, and each module that `widget.js` needs, once, as a function that returns the module's exports.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

__all__ = ["bundle"]

_HERE = Path(__file__).parent
_DASHBOARD = _HERE.parent / "gateway" / "dashboard"
_IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:const|class|function) (\w+))", re.MULTILINE)
_DEFAULT = re.compile(r"^export default (?=\{)", re.MULTILINE)
#: What no module may hold once its imports and exports are replaced.
_LEFT = re.compile(r"^(?:import|export)\b.*$", re.MULTILINE)
#: Style sheets of the panel, and how it stands in an output.
_SHEETS = ("vendor/uPlot.min.css", "dashboard.css")
_FRAME = ".frame { color: var(--text); padding: 2px; }\n.frame .panel { border-color: var(--line); }\n"


@cache
def bundle() -> str:
    """The text of the ES module, whose default export is an anywidget."""
    written: dict[str, str] = {"style": f"const m_style = {{ style: {json.dumps(_style())} }};\n"}
    text = _function("widget", (_HERE / "widget.js").read_text(), written)
    chart = (_DASHBOARD / "vendor" / "uPlot.iife.min.js").read_text()
    return "".join([chart, "\n", *written.values(), text, "export default m_widget.widget;\n"])


def _style() -> str:
    return "\n".join((_DASHBOARD / name).read_text() for name in _SHEETS) + _FRAME


def _function(name: str, text: str, written: dict[str, str]) -> str:
    """A module as a function that is called at once. Puts the modules that it imports into `written`, before it.

    Raises:
        ValueError: the module has an import or an export of another form.
    """
    for _, other in _IMPORT.findall(text):
        if other not in written:
            source = (_DASHBOARD / "js" / f"{other}.js").read_text()
            written[other] = _function(other, source, written)
    exports = _EXPORT.findall(text)
    text = _IMPORT.sub(lambda found: f"const {{ {found[1]} }} = m_{found[2]};\n", text)
    text = _EXPORT.sub("", text)
    if _DEFAULT.search(text):
        text, exports = _DEFAULT.sub("const widget = ", text), ["widget"]
    if (left := _LEFT.search(text)) is not None:
        raise ValueError(f"{name}.js: the bundle cannot take {left[0]!r}")
    return f"const m_{name} = (() => {{\n{text}return {{ {', '.join(exports)} }};\n}})();\n"
