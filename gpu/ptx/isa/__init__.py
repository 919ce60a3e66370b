"""What each PTX instruction does: one module per family, registered in registry.TABLE when
imported.
"""

from gpu.ptx.isa import (  # noqa: F401
    asynchronous,
    barriers,
    bits,
    bulk,
    carry,
    cluster,
    comparison,
    conversion,
    double,
    floating,
    half,
    integer,
    memory,
    mma,
    movement,
    narrow,
    packed_integer,
    stochastic,
    synchronization,
    tensor,
    tensormaps,
    warp,
    warpgroup,
    wmma,
)
