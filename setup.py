"""Say in a sentence where lightck cannot be built; all else is in pyproject.toml."""

import shutil
import sys

from setuptools import setup
from setuptools.command.build_ext import build_ext

if sys.platform != "linux":
    raise SystemExit(
        f"lightck needs Linux, whose mappings its regions use; this is {sys.platform}."
    )


class Build(build_ext):
    """Compile the native part, after a look for the compiler."""

    def build_extensions(self) -> None:
        """Compile, or end with what is missing and what to do."""
        compiler = self.compiler.compiler_so[0]
        if shutil.which(compiler) is None:
            raise SystemExit(
                f"lightck's native part is C and there is no {compiler} to compile it: install gcc,"
                " set CC, or take a wheel (pip install --only-binary lightck lightck)."
            )
        super().build_extensions()


setup(cmdclass={"build_ext": Build})
