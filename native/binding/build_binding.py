"""Writes the C source of the extension module geist_pool._geist from the public header.

    python build_binding.py geist.h OUT.c

The declarations between [cdef] and [/cdef] in the header are the binding: there is no second list to keep in step.
"""

import re
import sys
from pathlib import Path

import cffi


def declarations(header: str) -> str:
    """The part of the header that cffi reads: no preprocessor lines but integer constants."""
    start, end = header.index("/* [cdef] */"), header.index("/* [/cdef] */")
    lines = []
    for line in header[start:end].splitlines():
        if line.startswith("#define"):
            name = re.match(r"#define (\w+) \d+", line)
            if not name:
                raise SystemExit(f"not an integer constant: {line}")
            lines.append(f"#define {name[1]} ...")
        elif line.startswith("#"):
            raise SystemExit(f"only integer constants may be defined between the marks: {line}")
        else:
            lines.append(line)
    return "\n".join(lines)


def main() -> None:
    header_path, out_path = Path(sys.argv[1]), Path(sys.argv[2])
    ffi = cffi.FFI()
    ffi.cdef(declarations(header_path.read_text()))
    ffi.set_source("geist_pool._geist", '#include "geist.h"\n')
    ffi.emit_c_code(str(out_path))


if __name__ == "__main__":
    main()
