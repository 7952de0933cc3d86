"""Which values go to the servers now, and which wait: one filter a file, and chains of them."""

from syncline.server.filters.base import Filter
from syncline.server.filters.cache import Cache, digest_of
from syncline.server.filters.catalog import build_filter, filter_names
from syncline.server.filters.chain import FilterChain
from syncline.server.filters.significant import Significant
from syncline.server.filters.skip import Skip

__all__ = ["Cache", "Filter", "FilterChain", "Significant", "Skip", "build_filter", "digest_of", "filter_names"]
