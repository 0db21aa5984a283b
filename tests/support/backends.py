"""GEMM backends that a test registered are gone after it."""

from sparse24_kernels.gemm import backend


def unregister_backend(name: str) -> None:
    for known in (backend._backends, backend.AUTOMATIC):
        known.pop(name, None)
