"""A Jinja environment whose templates end, and do not fill the memory.

Jinja's sandbox keeps a template from the host's objects, not from making a text of terabytes. Here
everything that makes texts or containers is checked before it is done or, where it at most doubles
them, after: operators, calls, filters, literals, loops, and what is printed. Loops, calls, filters
and prints look at the clock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from surefoot.models.loading.template_checks import (
    WIDE_FILTERS,
    WORDY_FILTERS,
    add,
    check_method,
    check_percent,
    check_width,
    multiply,
    power,
    remainder,
    replaced,
    sized,
)
from surefoot.models.loading.template_limits import LimitReached, Work, bounded, running

REMOVED = ("pprint", "urlize", "wordwrap", "xmlattr")
"""Filters for web pages and people, whose size is hard to tell beforehand."""


def render_limited(template: Any, variables: Mapping[str, Any]) -> str:
    """A template of ``LimitedEnvironment``, rendered. Raises LimitReached, and whatever else a
    template may raise."""
    running.work = work = Work()
    try:
        work.size(dict(variables))
        return template.render(variables)
    finally:
        del running.work


def _ticking(items: Iterable[Any]) -> Iterator[Any]:
    work = running.work
    for item in items:
        work.tick()
        yield item


@pass_context
def _printed(context: Any, value: Any) -> Any:
    # Taking a context, it is not called for constants while a template is compiled.
    running.work.printing(value)
    return value


class _Checks(NodeTransformer):
    """Puts checks around what has no hook of its own."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_ticking")
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        # Constants are printed through the environment's check, data would not be.
        return nodes.Const(node.data, lineno=node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_sized")

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._literal(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._literal(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._literal(node) if node.ctx == "load" else node

    def _literal(self, node: Any) -> nodes.Expr:
        if all(isinstance(child, nodes.Const) for child in node.iter_child_nodes()):
            return node
        self.generic_visit(node)
        return _filtered(node, "_sized")


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter ``name`` with its checks. Copies Jinja's mark of one that takes a context."""
    place = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def checked(*args: Any, **named: Any) -> Any:
        work = running.work
        work.tick()
        before, value, rest = args[:place], args[place], args[place + 1 :]
        if isinstance(value, Iterator):
            value = [*bounded(value)] if name == "join" else bounded(value)
        values = (*rest, *named.values())
        if name in WIDE_FILTERS:
            check_width(*values)
        if name in WORDY_FILTERS and isinstance(value, (str, bytes)):
            work.taking_apart(len(value))
        if name == "replace" and len(values) >= 2:
            replaced(str(value), *values[:2])
        elif name == "format":
            check_percent(str(value), values)
        elif name == "indent" and values:
            width = values[0] if isinstance(values[0], int) else work.size(values[0])
            work.made_text(work.size(value) + str(value).count("\n") * width)
        elif name == "join" and values and isinstance(value, (list, tuple, dict, str)):
            work.made_text(work.size(value) + len(value) * work.size(values[0]))
        elif name == "sum" and any(isinstance(value, (list, tuple)) for value in values):
            raise LimitReached("it adds up something else than numbers")
        result = function(*before, value, *rest, **named)
        if isinstance(result, (str, bytes)):
            work.made_text(len(result))
        return result

    return checked


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with limits; render its templates with ``render_limited``."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        # Nothing is computed while a template is compiled, when nothing is counted.
        super().__init__(optimized=False, finalize=_printed, **options)
        self.binop_table.update({"+": add, "*": multiply, "**": power, "%": remainder})
        del self.globals["lipsum"]
        for name in REMOVED:
            del self.filters[name]
        self.filters.update(_ticking=_ticking, _sized=sized)
        self._checked: set[Callable[..., Any]] = {_ticking, sized}
        self.limit_filters()

    def limit_filters(self) -> None:
        """Check all filters there are; to be called after adding one."""
        for name, function in self.filters.items():
            if function not in self._checked:
                self.filters[name] = _limited(name, function)
        self._checked = {*self.filters.values()}

    def _generate(self, source: nodes.Template, *args: Any, **named: Any) -> str:
        return super()._generate(_Checks().visit(source), *args, **named)

    def call(__self, __context: Any, __obj: Any, *args: Any, **named: Any) -> Any:
        work = running.work
        work.tick()
        args = tuple(bounded(item) if isinstance(item, Iterator) else item for item in args)
        method = getattr(__obj, "__wrapped__", __obj)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, (str, bytes, int, float)):
            if name == "join" and args and isinstance(args[0], Iterator):
                args = ([*args[0]], *args[1:])
            # Jinja's own arguments, _loop_vars and _block_vars, are not passed on.
            given = [value for key, value in named.items() if not key.startswith("_")]
            check_method(owner, name, [*args, *given])
        result = super().call(__context, __obj, *args, **named)
        if __obj is dict or name == "fromkeys":
            work.size(result)
        elif isinstance(result, (str, bytes)):
            work.made_text(len(result))
        return result
