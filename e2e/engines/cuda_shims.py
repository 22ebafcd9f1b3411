"""Make torch importable where CUDA's libraries are absent: cuda_shims.py SITE_PACKAGES

PyPI's torch for x86-64 Linux is linked with two gigabytes of CUDA libraries that a machine without a GPU never calls.
For each of them a shared library of the same name is compiled here whose functions return 100, CUDA's "no device". The
CUDA runtime itself is small and stays the real one.
"""
import pathlib
import re
import subprocess
import sys
import tempfile

CUDA = re.compile(r"lib(cu|nv|nccl)")
UNVERSIONED = re.compile(r"(cu[A-Z]|cuFile|cusparseLt|curand|nccl|nvshmem)\w*$")
# Looked for by file name, not linked.
BY_NAME = ("libnvJitLink.so.13", "libnvrtc-builtins.so.13.0")


def readelf(*arguments):
    return subprocess.run(["readelf", "-W", *arguments], capture_output=True, text=True, check=True).stdout


def survey(libraries):
    """What the libraries want: names of CUDA libraries, {version: library}, {version or "": functions}."""
    names, home, functions = set(BY_NAME), {}, {"": set()}
    for path in map(str, libraries):
        names.update(n for n in re.findall(r"\(NEEDED\).*\[(.+?)\]", readelf("-d", path)) if CUDA.match(n))
        library = ""
        for line in readelf("-V", path).splitlines():
            if found := re.search(r"File: (\S+)", line):
                library = found[1]
            elif (found := re.search(r"Name: (\S+)\s+Flags:", line)) and CUDA.match(library):
                home[found[1]] = library
        for line in readelf("--dyn-syms", path).splitlines():
            columns = line.split()
            if len(columns) < 8 or columns[6] != "UND" or columns[4] != "GLOBAL":
                continue
            name, _, version = columns[7].partition("@")
            if version:
                functions.setdefault(version, set()).add(name)
            elif UNVERSIONED.match(name):
                functions[""].add(name)
    return names, home, functions


def build(target, functions):
    """Compile one library from {version or "": functions}."""
    with tempfile.TemporaryDirectory() as folder:
        source, script = pathlib.Path(folder, "shim.c"), pathlib.Path(folder, "shim.map")
        everything = sorted(set().union(*functions.values()))
        source.write_text("".join(f"int {f}(void) {{ return 100; }}\n" for f in everything))
        command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{target.name}", "-o", str(target), str(source)]
        versions = {v: sorted(f) for v, f in functions.items() if v}
        if versions:
            script.write_text("".join(f"{v} {{ global: {'; '.join(f)}; }};\n" for v, f in versions.items()))
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True)


def main(site):
    folder = site / "nvidia/cu13/lib"
    folder.mkdir(parents=True, exist_ok=True)
    names, home, functions = survey(sorted((site / "torch/lib").glob("*.so*")))
    for name in sorted(names):
        if (folder / name).exists():
            continue
        # A function without a version may be found in any library: all have them.
        mine = {v: f for v, f in functions.items() if home.get(v) == name}
        build(folder / name, {"": functions[""], **mine})


main(pathlib.Path(sys.argv[1]))
