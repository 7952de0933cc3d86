"""Spatial parallelism: the workers of a team have strips of the images, and exchange the rows at their edges."""

from syncline.parallel.spatial_layers.regions import SpatialDivision, spatial_divisions

__all__ = ["SpatialDivision", "spatial_divisions"]
