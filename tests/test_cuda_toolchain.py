"""`--device cuda`: which nvcc and which GPUs, what is said when one is missing, and what a build depends on.

nvcc is a script here, so that all of it is tested on machines without CUDA too.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from build_support import Workshop, rendered

from gradgen import BuildError, UsageError, cli, cuda_toolchain, keys, manifest
from gradgen.cuda_toolchain import find_nvcc, gpu_archs, parse_arch
from gradgen.importer import wrong_device
from gradgen.package import build_package
from gradgen.runtime_files import runtime_sources
from gradgen.toolchain import ToolchainMissing, find_toolchain, python_tag

KERNEL = '#include "gradgen/fake.h"\nint kernel_value() { return 1; }\n'
SCRIPT = """#!/bin/sh
case "$*" in
*--version*) echo "Cuda compilation tools, release {release}, V{release}.88" ;;
*--list-gpu-code*) printf 'sm_75\\nsm_80\\nsm_90\\nsm_100\\n' ;;
*--dryrun*) echo '#$ INCLUDES="-I{folder}/include"' >&2; echo '#$ LIBRARIES="-L{folder}/lib"' >&2 ;;
*)
    echo "$*" >> {folder}/nvcc-calls
    while [ $# -gt 0 ]; do case "$1" in -include) source=$2 ;; -o) target=$2 ;; esac; shift; done
    {body}
    exec g++ -fPIC -x c++ -Iinclude -I. -c "$source" -o "$target" ;;
esac
"""


class Toolkit:
    """A CUDA toolkit of scripts, and a machine with the GPUs that the test wants."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch
        for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "GRADGEN_NVCCFLAGS"):
            patch.delenv(name, raising=False)
        patch.setattr(cuda_toolchain, "TOOLKIT", str(folder / "no-toolkit"))
        (folder / "include").mkdir(parents=True)
        (folder / "include" / "cuda_runtime_api.h").write_text("")
        (folder / "lib").mkdir()
        (folder / "lib" / "libcudart_static.a").write_bytes(b"!<arch>\n")
        self.nvcc()
        self.gpus()

    def nvcc(self, release: str = "13.0", body: str = "") -> None:
        self.script("bin/nvcc", SCRIPT.format(release=release, folder=self.folder, body=body))
        self.patch.setenv("CUDA_HOME", str(self.folder))
        cuda_toolchain._find_nvcc.cache_clear()

    def script(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def gpus(self, *archs: str) -> None:
        found = (archs, ()) if archs else ((), ("nvidia-smi: not found", "libcuda.so.1: not found"))
        self.patch.setattr(cuda_toolchain, "gpu_archs", lambda path: found)

    def no_nvcc(self) -> None:
        self.patch.delenv("CUDA_HOME")
        folder = self.folder / "only-g++"
        folder.mkdir()
        for name in ("g++", "clang++"):
            real = next(
                (p for d in os.get_exec_path() if (p := Path(d, name)).is_file()), None
            )  # nvcc may lie beside it
            if real:
                (folder / name).symlink_to(real)
        self.patch.setenv("PATH", str(folder))


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toolkit:
    return Toolkit(tmp_path / "kit", monkeypatch)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kit: Toolkit) -> Workshop:
    shop = Workshop(tmp_path, monkeypatch)
    (shop.runtime / "cuda").mkdir()
    (shop.runtime / "cuda/one.cu").write_text(KERNEL)
    (shop.runtime / "cuda/host.cpp").write_text(
        "int kernel_value();\nint host_value() { return kernel_value(); }\n"
    )
    return shop


# What is said


def test_architectures() -> None:
    assert parse_arch("sm_90,sm_80, sm_100,sm_80") == ("sm_80", "sm_90", "sm_100")
    assert parse_arch(["sm_90a", "sm_90"]) == ("sm_90", "sm_90a")


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("90", "'90' is not a GPU architecture.*did you mean 'sm_90'"),
        ("9.0", "did you mean 'sm_90'"),
        ("sm_80;sm_90", "write sm_90, or sm_80,sm_90 for several$"),
        ("hopper", "'hopper' is not"),
        ("", "'' is not"),
        ([], "no GPU architecture given"),
        ([90], "did you mean 'sm_90'"),
        ("sm_75", "sm_75 is too old: the kernels need sm_80 or newer"),
        ("sm_91", "nvcc 13.0.88 cannot compile for sm_91; it can for sm_80, sm_90, sm_100"),
    ],
)
def test_what_is_no_architecture(kit: Toolkit, arch: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_toolchain("cuda", arch)


def test_architectures_are_for_cuda() -> None:
    with pytest.raises(UsageError, match="arch names GPUs and device is cpu"):
        find_toolchain("cpu", "sm_90")
    with pytest.raises(UsageError, match="device must be cpu, cuda or auto, not 'gpu'"):
        find_toolchain("gpu")


def test_no_nvcc(kit: Toolkit) -> None:
    kit.no_nvcc()
    with pytest.raises(ToolchainMissing) as caught:
        find_toolchain("cuda", "sm_90")
    text = str(caught.value)
    assert "no CUDA compiler (nvcc: not found; " in text and "no-toolkit/bin/nvcc: not found)" in text
    assert "install the CUDA toolkit 12 or newer, or set CUDACXX" in text and "GPU" not in text
    kit.patch.setenv("CUDA_HOME", "/nowhere")
    with pytest.raises(ToolchainMissing, match="CUDA_HOME=/nowhere: no bin/nvcc there; nvcc: not found"):
        find_toolchain("cuda", "sm_90")
    kit.patch.setenv("CUDACXX", "no-such-nvcc")
    with pytest.raises(ToolchainMissing, match=r"no CUDA compiler \(CUDACXX=no-such-nvcc: not found\)"):
        find_toolchain("cuda", "sm_90")


def test_no_gpu(kit: Toolkit) -> None:
    with pytest.raises(ToolchainMissing) as caught:
        find_toolchain("cuda")
    assert "no GPU to compile for (nvidia-smi: not found; libcuda.so.1: not found)" in str(caught.value)
    assert "--arch sm_90" in str(caught.value) and "nvcc" not in str(caught.value)
    kit.no_nvcc()
    with pytest.raises(ToolchainMissing, match=r"no CUDA compiler [^\n]*\n  and no GPU to compile for"):
        find_toolchain("cuda")


def test_exit_codes(kit: Toolkit, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["build", str(tiny), "--device", "cuda"]) == 3
    assert "--arch sm_90" in capsys.readouterr().err
    assert cli.main(["build", str(tiny), "--device", "cuda", "--arch", "90"]) == 2
    assert cli.main(["build", str(tiny), "--device", "cpu", "--arch", "sm_90"]) == 2
    assert "arch names GPUs" in capsys.readouterr().err


def test_nvcc_that_cannot_be_used(kit: Toolkit) -> None:
    kit.nvcc("11.8")
    kit.patch.setenv("CUDACXX", str(kit.folder / "bin" / "nvcc"))  # and no other one
    with pytest.raises(ToolchainMissing, match=r"nvcc 11\.8\.88 is too old, 12 is needed"):
        find_toolchain("cuda", "sm_90")
    kit.nvcc("12.4")
    (kit.folder / "lib" / "libcudart_static.a").unlink()
    cuda_toolchain._find_nvcc.cache_clear()
    kit.patch.setattr(cuda_toolchain.sysconfig, "get_config_var", lambda name: "none")
    with pytest.raises(ToolchainMissing, match=r"lacks libcudart_static\.a"):
        find_toolchain("cuda", "sm_90")
    kit.patch.setenv("CUDACXX", "/bin/true")
    with pytest.raises(ToolchainMissing, match="CUDACXX=/bin/true: not nvcc"):
        find_toolchain("cuda", "sm_90")


def test_a_better_nvcc_further_on_is_taken(kit: Toolkit) -> None:
    old = kit.script("old/bin/nvcc", "#!/bin/sh\necho release 10.2, V10.2.1\n")
    kit.patch.setenv("CUDA_HOME", str(old.parent.parent))
    kit.patch.setenv("CUDA_PATH", str(kit.folder))
    assert find_nvcc().command == (str(kit.folder / "bin" / "nvcc"),)


def test_gpus_of_the_machine(kit: Toolkit) -> None:
    kit.gpus("sm_90")
    assert find_toolchain("cuda").target == "cuda sm_90"
    kit.gpus("sm_89", "sm_120")  # not known to this nvcc: the newest that runs there
    assert find_toolchain("cuda").target == "cuda sm_80,sm_100"
    kit.gpus("sm_70")
    with pytest.raises(ToolchainMissing, match="the GPU here is sm_70, and the kernels need sm_80"):
        find_toolchain("cuda")
    assert find_toolchain("cuda", "sm_80").target == "cuda sm_80"


def test_nvidia_smi_or_the_driver_name_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf '9.0\\n9.0\\n8.6\\n'\n")
    smi.chmod(0o755)
    gpu_archs.cache_clear()
    assert gpu_archs(str(tmp_path)) == (("sm_86", "sm_90"), ())
    smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    monkeypatch.setattr(cuda_toolchain, "ASK_DRIVER", "print('8.0')")
    gpu_archs.cache_clear()
    assert gpu_archs(str(tmp_path)) == (("sm_80",), ())
    monkeypatch.setattr(cuda_toolchain, "ASK_DRIVER", "import sys; sys.exit('cuInit fails with 999')")
    gpu_archs.cache_clear()
    assert gpu_archs(str(tmp_path)) == (
        (),
        ("nvidia-smi: NVIDIA-SMI has failed", "libcuda.so.1: cuInit fails with 999"),
    )
    gpu_archs.cache_clear()


def test_the_driver_is_asked_in_its_own_words() -> None:
    """Whatever this machine has: an answer in the form that is read, or a reason in one line."""
    gpu_archs.cache_clear()
    archs, reasons = gpu_archs("/nowhere")
    assert archs or [reason.split(": ")[0] for reason in reasons] == ["nvidia-smi", "libcuda.so.1"]
    assert not any("Traceback" in reason or "SyntaxError" in reason for reason in reasons)


def test_auto(kit: Toolkit) -> None:
    assert find_toolchain("auto").target == "cpu"
    assert find_toolchain("auto", "sm_90").target == "cuda sm_90"
    kit.gpus("sm_90")
    assert find_toolchain("auto").target == "cuda sm_90"
    kit.no_nvcc()
    assert find_toolchain("auto").target == "cpu"


# What is built


def test_runtime_and_package_for_cuda(shop: Workshop, kit: Toolkit) -> None:
    shop.compiler()
    toolchain = find_toolchain("cuda", "sm_80,sm_90")
    out = shop.folder / "out"
    package = build_package(rendered(), "toy", out, toolchain, jobs=2, log=shop.notes.append)
    assert all(" cuda sm_80,sm_90: " in line for line in shop.notes)
    build = manifest.read(package.dir)[python_tag()]
    assert (build.device, build.arch) == ("cuda", "sm_80,sm_90")
    (nvcc,) = (kit.folder / "nvcc-calls").read_text().splitlines()
    for part in (
        "-fmad=false",
        "-std=c++20",
        "-O3",
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
        f"-ccbin {shop.folder / 'g++'}",
        "-DGRADGEN_CUDA=1",
        "-include cuda/one.cu",
    ):
        assert f" {part} " in f" {nvcc} "
    calls = (shop.folder / "calls").read_text()
    assert calls.count("-DGRADGEN_CUDA=1") == len(shop.compiled()) == 5
    (host,) = (line for line in calls.splitlines() if " -c cuda.cpp " in line)
    assert f"-isystem {kit.folder / 'include'}" in host
    result = shop.run(f"sys.path.insert(0, {str(out)!r})\nimport toy; print(toy.value)")
    assert result.stdout == "42\n", result.stderr

    (package.dir / "__init__.py").write_text("changed")
    stale = shop.run(
        f"""
        from gradgen.importer import native
        native({str(package.dir / "__init__.py")!r}, "toy", "x")
        """
    )
    assert "--device cuda --arch sm_80,sm_90\n" in stale.stderr


def test_the_last_device_of_a_package_wins(shop: Workshop) -> None:
    out = shop.folder / "out"
    build_package(rendered(), "toy", out, find_toolchain("cuda", "sm_90"), log=shop.notes.append)
    package = build_package(rendered(), "toy", out, find_toolchain(), log=shop.notes.append)
    assert manifest.read(package.dir)[python_tag()].device == "cpu"
    assert len(list(package.dir.glob("*.so"))) == 2
    assert "arch" in json.loads((package.dir / "build.json").read_text())["builds"][python_tag()]


def test_a_cpu_package_says_how_to_build_it_for_cuda(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    package = build_package(rendered(), "toy", shop.folder / "out", find_toolchain(), log=shop.notes.append)
    monkeypatch.chdir(shop.folder)
    text = "toy is built for the CPU; for device='cuda:1' build it for CUDA: gradgen build toy.yaml -o out --device cuda"
    assert wrong_device(package.dir, "toy", "cuda:1") == text
    cached = shop.build().dir
    assert wrong_device(cached, "toy", "cuda").endswith(
        'build it for CUDA: gradgen.load("toy.yaml", device="cuda")'
    )
    assert wrong_device(cached, "toy", "mps") == "device must be 'cpu' or 'cuda', not 'mps'"


def test_one_device_a_process(shop: Workshop) -> None:
    result = shop.run(
        """
        load(2)
        import_artifact(build_model(rendered(3), "toy", find_toolchain("cuda", "sm_90"), 2))
        """
    )
    assert "is built for cuda, and this process already uses a runtime that is built for cpu" in result.stderr
    assert "build all modules of a process for one device" in result.stderr


def test_what_a_key_depends_on(shop: Workshop, kit: Toolkit) -> None:
    def key(device: str = "cuda", arch: str | None = "sm_90") -> str:
        toolchain = find_toolchain(device, arch)
        return keys.runtime_key(runtime_sources(device), toolchain)

    def changed(*path: str) -> bool:
        before = key(), key("cpu", None)
        with (shop.runtime / Path(*path)).open("a") as file:
            file.write("\n")
        after = key(), key("cpu", None)
        return before[0] != after[0], before[1] != after[1]

    assert len({key(), key(arch="sm_80"), key(arch="sm_80,sm_90"), key("cpu", None)}) == 4
    assert key(arch="sm_90,sm_80") == key(arch="sm_80,sm_90")
    assert changed("cuda", "one.cu") == (True, False)
    assert changed("cuda", "host.cpp") == (True, False)
    assert changed("src", "core.cpp") == (True, True)
    before = key()
    kit.patch.setenv("GRADGEN_NVCCFLAGS", "-lineinfo")
    assert key() != before
    kit.patch.delenv("GRADGEN_NVCCFLAGS")
    kit.patch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")  # taken away from nvcc
    assert key() == before
    cuda = find_toolchain("cuda", "sm_90").cuda
    assert cuda is not None
    newer = dataclasses.replace(cuda, nvcc=dataclasses.replace(cuda.nvcc, version="13.1.0"))
    moved = dataclasses.replace(cuda, nvcc=dataclasses.replace(cuda.nvcc, command=("/elsewhere/nvcc",)))
    assert newer.identity != cuda.identity and moved.identity == cuda.identity


def test_flags_that_the_environment_gives_nvcc_are_taken_away(shop: Workshop, kit: Toolkit) -> None:
    kit.nvcc(body=f'echo "[$NVCC_APPEND_FLAGS]" > {kit.folder}/seen')
    kit.patch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    build_package(
        rendered(), "toy", shop.folder / "out", find_toolchain("cuda", "sm_90"), log=shop.notes.append
    )
    assert (kit.folder / "seen").read_text() == "[]\n"


def test_launchers_are_not_nvcc_s_host_compiler(kit: Toolkit) -> None:
    launcher = kit.script("ccache", '#!/bin/sh\nexec "$@"\n')
    kit.patch.setenv("CXX", f"{launcher} g++ -DX")
    cuda = find_toolchain("cuda", "sm_90").cuda
    assert cuda is not None and Path(cuda.host).name == "g++"


def test_errors_of_nvcc(shop: Workshop, kit: Toolkit) -> None:
    kit.nvcc(
        body='echo "cuda/one.cu(2): error: identifier \\"wrong\\" is undefined"; echo "  1 error"; exit 2'
    )
    with pytest.raises(BuildError) as caught:
        shop_build(shop)
    assert "compiling cuda_one.cu of runtime" in str(caught.value)
    assert 'failed\n  cuda/one.cu(2): error: identifier "wrong" is undefined\n' in str(caught.value)
    (kept,) = (shop.cache / "failed").iterdir()
    assert not list(kept.glob("*.keep")) and (kept / "cuda" / "one.cu").exists()


def test_a_compiler_that_is_too_new_for_nvcc(shop: Workshop, kit: Toolkit) -> None:
    words = "/usr/local/cuda/include/crt/host_config.h:153:2: error: #error -- unsupported GNU version! gcc versions later than 13"
    kit.nvcc(body=f"echo '{words}'; exit 1")
    with pytest.raises(BuildError) as caught:
        shop_build(shop)
    assert words in str(caught.value)
    assert "name a C++ compiler that this nvcc takes: for example CXX=g++-13" in str(caught.value)


def shop_build(shop: Workshop) -> None:
    toolchain = find_toolchain("cuda", "sm_90")
    build_package(rendered(), "toy", shop.folder / "out", toolchain, jobs=1, log=shop.notes.append)
