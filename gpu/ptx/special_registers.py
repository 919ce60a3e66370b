"""Predefined registers of all lanes: positions, extents, clusters.  Source: PTX ISA 8.8, chapter
10.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from simkit.errors import LaunchError

if TYPE_CHECKING:
    from gpu.ptx.grid import Grid

Array = np.ndarray


def special_register(grid: Grid, name: str) -> Array:
    """The value of a predefined register, broadcastable to (32, warps)."""
    launch = grid.launch
    base, _, axis = name.partition(".")
    dimension = "xyz".find(axis) if axis else 0
    lane = np.arange(32)[:, None]
    thread = lane + 32 * (np.arange(grid.warps) % grid.warps_per_cta)[None, :]
    cta = grid.cta_of_warp[None, :]
    block, ctas = (*launch.block, 1), (*launch.grid, 1)
    cluster, clusters = (*launch.cluster, 1), (*launch.clusters, 1)
    if axis == "w":
        return np.array(1 if base.startswith("%n") else 0)
    match base:
        case "%tid":
            return coordinate(thread, block, dimension)
        case "%ntid":
            return np.array(block[dimension])
        case "%ctaid":
            return cta_coordinate(grid, cta, dimension)
        case "%nctaid":
            return np.array(ctas[dimension])
        case "%laneid":
            return lane
        case "%warpid":
            return (np.arange(grid.warps) % grid.warps_per_cta)[None, :]
        case "%nwarpid":
            return np.array(launch.gpu.max_threads_per_sm // 32)
        case "%smid":
            return (grid.first + cta) % launch.gpu.sm_count
        case "%nsmid":
            return np.array(launch.gpu.sm_count)
        case "%lanemask_eq":
            return np.uint32(1) << lane.astype(np.uint32)
        case "%lanemask_lt":
            return (np.uint64(1) << lane.astype(np.uint64)) - np.uint64(1)
        case "%lanemask_le":
            return (np.uint64(2) << lane.astype(np.uint64)) - np.uint64(1)
        case "%lanemask_gt":
            return 0xFFFFFFFF ^ ((2 << lane.astype(np.int64)) - 1)
        case "%lanemask_ge":
            return 0xFFFFFFFF ^ ((1 << lane.astype(np.int64)) - 1)
        case "%dynamic_smem_size":
            return np.array(launch.dynamic_shared)
        case "%total_smem_size" | "%aggr_smem_size":
            return np.array(launch.shared_bytes)
        case "%clusterid":
            return coordinate((grid.first + cta) // grid.cluster_size, clusters, dimension)
        case "%nclusterid":
            return np.array(clusters[dimension])
        case "%cluster_nctaid":
            return np.array(cluster[dimension])
        case "%cluster_nctarank":
            return np.array(grid.cluster_size)
        case "%cluster_ctaid":
            return coordinate(cta % grid.cluster_size, cluster, dimension)
        case "%cluster_ctarank":
            return cta % grid.cluster_size
        case "%is_explicit_cluster":
            return np.array(int(launch.is_cluster_launch))
        case "%gridid":
            return np.array(0)
        case _:
            raise LaunchError(f"special register {name} is not supported")


def cta_coordinate(grid: Grid, cta: Array, dimension: int) -> Array:
    """A coordinate of resident CTAs.  CTAs come cluster by cluster, in rank order within
    one.
    """
    launch = grid.launch
    cluster, rank = np.divmod(grid.first + cta, grid.cluster_size)
    extent = (*launch.cluster, 1)[dimension]
    return coordinate(cluster, (*launch.clusters, 1), dimension) * extent + coordinate(
        rank, (*launch.cluster, 1), dimension
    )


def coordinate(linear: Array, extents: tuple[int, ...], dimension: int) -> Array:
    """One coordinate of a linear index, x fastest."""
    for extent in extents[:dimension]:
        linear = linear // extent
    return linear % extents[dimension]
