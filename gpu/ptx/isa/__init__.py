"""What each PTX instruction does: one module per family, registered in registry.TABLE when
imported.
"""

from gpu.ptx.isa import (  # noqa: F401
    asynchronous,
    barriers,
    bulk,
    cluster,
    comparison,
    conversion,
    floating,
    half,
    integer,
    memory,
    movement,
    synchronization,
    tensor,
    tensormaps,
    warp,
    warpgroup,
)
