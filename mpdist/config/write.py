"""Plain values to YAML that YAML 1.1 and 1.2 readers take the same way."""

from __future__ import annotations

import json
import math
import re
from typing import Any

# Words that some YAML version reads as something other than text.
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n", "~"}
_PLAIN = r"[A-Za-z_/][A-Za-z0-9_./+@-]*(?: [A-Za-z0-9_./+@-]+)*"


def block(values: dict[str, Any], indent: int = 0) -> str:
    lines = []
    for key, value in values.items():
        head = " " * indent + _text(key) + ":"
        if isinstance(value, dict) and value:
            lines.append(f"{head}\n{block(value, indent + 2)}")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            lines.append(head + "\n" + "".join(f"{' ' * indent}  - {inline(item)}\n" for item in value))
        else:
            lines.append(f"{head} {inline(value)}\n")
    return "".join(lines)


def inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(str(key))}: {inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(inline(item) for item in value) + "]"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str):
        return _text(value)
    return json.dumps(value)


def _number(value: float) -> str:
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    text = repr(value)
    mantissa, e, exponent = text.partition("e")
    # YAML 1.1 readers take 2e-05 for text.
    return f"{mantissa}.0e{exponent}" if e and "." not in mantissa else text


def _text(value: str) -> str:
    if re.fullmatch(_PLAIN, value) and value.lower() not in _WORDS:
        return value
    quoted = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)
