"""Every filter by its name."""

from __future__ import annotations

from syncline.errors import SpecError
from syncline.server.filters.base import Filter
from syncline.server.filters.cache import Cache
from syncline.server.filters.chain import FilterChain
from syncline.server.filters.significant import Significant
from syncline.server.filters.skip import Skip
from syncline.specs import Registry

__all__ = ["build_filter", "filter_names"]

NOTHING = "none"
"""What stands for no filter where only text can be written."""


def build_filter(spec: str | Filter | None) -> Filter | None:
    """The filter, or chain of filters, that a spec describes; None for None and 'none'.

    >>> build_filter("significant(0.01)|cache")
    significant(0.01)|cache
    >>> build_filter("none") is None
    True
    """
    if spec is None or isinstance(spec, Filter):
        return spec
    if not isinstance(spec, str):
        raise SpecError(f"a filter is a spec such as 'significant(0.01)|cache', a filter or None, not {spec!r}")
    registry = _registry()
    links = registry.read(spec)
    if len(links) == 1 and links[0].name == NOTHING and not links[0].args and not links[0].kwargs:
        return None
    if any(link.name == NOTHING for link in links):
        raise SpecError(f"{spec!r}: 'none' stands alone, without arguments: it means that nothing is filtered")
    built = tuple(registry.make(link) for link in links)
    return built[0] if len(built) == 1 else FilterChain(built)


def filter_names() -> list[str]:
    """Every name that a link of a filter's spec may begin with."""
    return _registry().names()


def _registry() -> Registry[Filter]:
    registry = Registry[Filter]("filter")
    for each in (Significant, Skip, Cache):
        registry.add(each.name, each)
    return registry
