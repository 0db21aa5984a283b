"""Puts the compiled kernels for CPUs into a wheel: `SPARSE24_BUILD_KERNELS=1 python -m build --wheel`.

Without the variable the wheel is for any platform, and compiles them on first use. Everything else is in setup.cfg.
"""

import os
import platform
import runpy
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

CPU = "sparse24_kernels/cpu"


class Kernels(build_py):
    def run(self):
        super().run()
        build = runpy.run_path(str(Path(__file__).parent / "kernels" / CPU / "build.py"))
        build["build"](Path(self.build_lib) / CPU / f"native-{build['fingerprint']()}.so")


class OfOnePlatform(Distribution):
    def has_ext_modules(self):
        return True


class AnyPython(bdist_wheel):
    def get_tag(self):
        """The library is called through plain C functions."""
        return "py3", "none", super().get_tag()[2].replace("universal2", platform.machine())


if os.environ.get("SPARSE24_BUILD_KERNELS"):
    setup(distclass=OfOnePlatform, cmdclass={"build_py": Kernels, "bdist_wheel": AnyPython})
else:
    setup()
