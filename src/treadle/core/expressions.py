"""Evaluate an expression of literals and known names, without executing other code."""

import ast
from collections.abc import Mapping
from typing import Any


def evaluate(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of a parsed expression that consists of literals, lists and known names.

    A known name may be called, subscripted, and joined by `|`. Only the last part of a dotted name
    counts: `typing.Literal` means `Literal`.

    Raises:
        ValueError: If the expression contains anything else.
        Exception: Whatever a known name raises when it is called or subscripted.

    Example:
        >>> evaluate(ast.parse("range(2, -3)", mode="eval").body, {"range": range})
        range(2, -3)
    """
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=ast.Constant()):
            return ast.literal_eval(node)
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in names:
            return names[name]
        case ast.List(elts=parts):
            return [evaluate(part, names) for part in parts]
        case ast.Tuple(elts=parts):
            return tuple(evaluate(part, names) for part in parts)
        case ast.Subscript(value=value, slice=index):
            return evaluate(value, names)[evaluate(index, names)]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return evaluate(left, names) | evaluate(right, names)
        case ast.Call(func=called, args=args, keywords=words) if all(word.arg for word in words):
            named = {str(word.arg): evaluate(word.value, names) for word in words}
            return evaluate(called, names)(*(evaluate(part, names) for part in args), **named)
        case _:
            raise ValueError(f"{ast.unparse(node)} is neither a literal nor a known name")
