"""The C++ compiler that headers of cuda/ are compiled with for the host; None where there is none."""

import os
import shutil

COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
