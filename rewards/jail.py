"""Program of a sandboxed interpreter: gives up rights, then runs a program. Imports nothing of ours.

Its arguments are descriptors of the settings (JSON) and of the result. Before the program runs come limits on processor
time, memory, files and output; Landlock, where the kernel has it, which leaves only the interpreter's own files to be
read; and a seccomp filter of the system calls of computing and reading, which refuses sockets, processes, signals to
others and changes of files, for the life of the process. Sources: seccomp(2), and seccomp_filter.rst, landlock.rst and
the tables of system calls of Linux.
"""

import builtins
import ctypes
import importlib
import json
import os
import platform
import resource
import struct
import sys
from typing import Any, cast

# AUDIT_ARCH_* and the column of ``CALLS`` by machine
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# System calls that are allowed with any argument
CALLS = {
    # Numbers on x86_64 and aarch64; None where there is no such call.
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "close": (3, 57), "close_range": (436, 436), "fstat": (5, 80), "stat": (4, None),
    "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291), "statfs": (137, 43), "fstatfs": (138, 44),
    "lseek": (8, 62), "fadvise64": (221, 223), "access": (21, None), "faccessat": (269, 48),
    "faccessat2": (439, 439), "readlink": (89, None), "readlinkat": (267, 78), "getdents64": (217, 61),
    "getcwd": (79, 17), "chdir": (80, 49), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216), "madvise": (28, 233), "brk": (12, 214),
    "mincore": (27, 232), "membarrier": (324, 283), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "sigaltstack": (131, 132), "restart_syscall": (219, 128), "pipe": (22, None),
    "pipe2": (293, 59), "select": (23, None), "pselect6": (270, 72), "poll": (7, None), "ppoll": (271, 73),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "eventfd2": (290, 19), "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "getcpu": (309, 168),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getrusage": (98, 165),
    "getrlimit": (97, 163), "sysinfo": (99, 179), "uname": (63, 160), "getpid": (39, 172), "gettid": (186, 178),
    "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getresuid": (118, 148), "getresgid": (120, 150), "getpgid": (121, 155), "getsid": (124, 156),
    "getgroups": (115, 158), "futex": (202, 98), "set_robust_list": (273, 99), "get_robust_list": (274, 100),
    "set_tid_address": (218, 96), "rseq": (334, 293), "arch_prctl": (158, None), "getrandom": (318, 278),
    "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
OPEN, OPENAT, CLONE, CLONE3 = (2, None), (257, 56), (56, 220), (435, 435)
IOCTL, PRLIMIT, KILL, TGKILL, FCNTL = (16, 29), (302, 261), (62, 129), (234, 131), (72, 25)
F_SETFL, F_DUPFD_CLOEXEC = 4, 1030
CLONE_THREAD = 0x10000
# Flags of open(2) with which a file is written or made: O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_TMPFILE
WRITING = 0o3 | 0o100 | 0o1000 | 0o20000000
EPERM, EACCES, ENOTTY, ENOSYS = 1, 13, 25, 38

CONFINED = b"+"  # First byte of a result whose process is confined; without it a result is the reason why it is not

AST_ONLY = 0x400  # Flag of ``compile``: ast.PyCF_ONLY_AST, without importing that module
# Modules whose public names need no import; of two with a name, the later one's is used.
#
# Source: the imports that LiveCodeBench (lcb_runner/evaluation/testing_util.py at 28fef95e) puts before each program,
# as APPS and verl do.
MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
    "itertools", "functools", "operator", "io", "sys", "json", "typing",
)  # fmt: skip

_LOAD, _EQUAL, _GREATER, _SET, _AND, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def seccomp_filter(machine: str, pid: int) -> bytes:
    """Return the BPF program for a machine and the process with this id. Raises KeyError for another machine."""
    audit, column = ARCHITECTURES[machine]
    code: list[tuple[int, int, int, int]] = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, audit)]
    code += [(_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]

    def when(call: "tuple[int | None, int | None]", *then: "tuple[int, int, int, int]") -> None:
        """Append instructions for one system call; the last of them returns."""
        if (number := call[column]) is not None:
            code.extend([(_EQUAL, 0, len(then), number), *then])

    def argument(place: int) -> "tuple[int, int, int, int]":
        """Return the load of the lower half of an argument."""
        return _LOAD, 0, 0, 16 + 8 * place

    allow, refuse = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | EPERM)
    for numbers in CALLS.values():
        when(numbers, allow)
    for call, place in ((OPEN, 1), (OPENAT, 2)):
        when(call, argument(place), (_AND, 0, 0, WRITING), (_EQUAL, 0, 1, 0), allow, (_RETURN, 0, 0, _ERRNO | EACCES))
    when(CLONE, argument(0), (_SET, 0, 1, CLONE_THREAD), allow, refuse)
    when(CLONE3, (_RETURN, 0, 0, _ERRNO | ENOSYS))  # its flags are in memory; without it libc uses clone
    when(IOCTL, (_RETURN, 0, 0, _ERRNO | ENOTTY))
    when(PRLIMIT, argument(2), (_EQUAL, 0, 3, 0), (_LOAD, 0, 0, 16 + 8 * 2 + 4), (_EQUAL, 0, 1, 0), allow, refuse)
    # Not F_SETOWN and F_SETSIG, by which the kernel sends signals to any process of this user.
    when(FCNTL, argument(1), (_EQUAL, 1, 0, F_DUPFD_CLOEXEC), (_GREATER, 1, 0, F_SETFL), allow, refuse)
    for call in (KILL, TGKILL):
        when(call, argument(0), (_EQUAL, 0, 1, pid), allow, refuse)
    code.append(refuse)
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def confine(program: bytes) -> None:
    """Install a seccomp filter in this process. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    # PR_SET_NO_NEW_PRIVS, without which an unprivileged process may set no filter, then PR_SET_SECCOMP.
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.c_char_p(described), 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def leave_readable(places: "list[str]") -> bool:
    """Leave only files at and below these places to be read, by Landlock. Returns False where the kernel has none."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)
    every = (1 << 13) - 1  # the rights of the first version of Landlock
    ruleset = libc.syscall(444, ctypes.c_char_p(struct.pack("<Q", every)), 8, 0)
    if ruleset < 0:
        return False
    for place in places:
        try:
            opened = os.open(place, os.O_PATH)
        except OSError:
            continue
        rights = 1 << 2 | (1 << 3 if os.path.isdir(place) else 0)  # READ_FILE, READ_DIR
        libc.syscall(445, ruleset, 1, ctypes.c_char_p(struct.pack("<Qi", rights, opened)), 0)
        os.close(opened)
    confined = libc.syscall(446, ruleset, 0) == 0
    os.close(ruleset)
    return confined


def limit(kind: int, value: int) -> None:
    """Set a limit of this process, or keep a lower one."""
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def main() -> None:
    """Read the settings, confine this process, run the program, and write the result."""
    settings_at, result_at = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(settings_at) as file:
        settings = json.load(file)
    try:
        restrict(settings)
    except (OSError, ValueError, KeyError) as error:
        os.write(result_at, repr(error).encode())
        os._exit(1)
    os.write(result_at, CONFINED)  # before the program runs: what it writes comes behind
    report = run(settings)
    os.write(result_at, json.dumps(report).encode()[: settings["max_result"]])
    sys.stdout.flush()
    os._exit(0)  # a program's exit handlers and threads have no part in its result


def restrict(settings: "dict[str, int]") -> None:
    """Give up files, memory, time and system calls. Raises OSError, ValueError, KeyError where that cannot be done."""
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(100_000)
    interpreter = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, "/usr", "/lib", "/lib64"]
    leave_readable([*interpreter, "/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/urandom"])
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, 0)
    limit(resource.RLIMIT_NOFILE, 64)
    limit(resource.RLIMIT_AS, settings["memory_mb"] << 20)
    limit(resource.RLIMIT_CPU, settings["cpu_s"])
    confine(seccomp_filter(platform.machine(), os.getpid()))


def run(settings: "dict[str, object]") -> "dict[str, object]":
    """Run the program to its end or exit, and then the call or the tests that the settings have."""
    names: dict[str, object] = {"__name__": "__main__", "__builtins__": __builtins__}
    sys.argv = ["solution.py"]
    try:
        try:
            program = str(settings["program"])
            if settings["imports"]:
                names |= imported(program)
            exec(compile(program, "solution.py", "exec"), names)
        except SystemExit as error:
            if settings["call"] or settings["tests"]:
                raise
            return {"ended": error.code in (None, 0), "code": error.code if isinstance(error.code, int) else 1}
        if settings["tests"]:
            exec(compile(str(settings["tests"]), "tests.py", "exec"), names)
            return {"passed": settings["word"]}
        if settings["call"]:
            name, arguments = cast("tuple[str, list[object]]", settings["call"])
            function: Any = names[name] if name in names else getattr(cast("Any", names["Solution"])(), name)
            return {"value": json.loads(json.dumps(function(*arguments), default=list))}
        return {"ended": True}
    except BaseException as error:  # of the program, SystemExit too
        return {"error": type(error).__name__, "text": str(error)[:300]}


def imported(program: str) -> "dict[str, object]":
    """Return the names of ``MODULES`` that a program reads and never binds, which it imports where it has to."""
    namespace: dict[str, object] = {}
    for name in missing(program):
        if name in MODULES:
            namespace[name] = importlib.import_module(name)
            continue
        for module in map(importlib.import_module, reversed(MODULES)):
            if name in getattr(module, "__all__", ()) or (
                not hasattr(module, "__all__") and name[:1] != "_" and hasattr(module, name)
            ):
                namespace[name] = getattr(module, name)
                break
    return namespace


def missing(program: str) -> "set[str]":
    """Return the names that a program reads, and that neither it nor Python binds. Raises the errors of ``compile``."""
    read: set[str] = set()
    bound: set[str | None] = {*dir(builtins), "__name__", "__builtins__"}
    nodes: list[Any] = [compile(program, "solution.py", "exec", AST_ONLY)]
    while nodes:
        node = nodes.pop()
        kind = type(node).__name__
        if kind == "Name":
            (read if type(node.ctx).__name__ == "Load" else bound).add(node.id)
        elif kind == "alias":
            bound.add(node.asname or node.name.split(".")[0])
        elif kind != "keyword":
            # Of a function, class, exception, pattern or parameter.
            bound |= {getattr(node, "name", None), getattr(node, "arg", None)}
        for field in node._fields:
            value = getattr(node, field, None)
            nodes += [child for child in (value if isinstance(value, list) else [value]) if hasattr(child, "_fields")]
    return {name for name in read if name not in bound}


if __name__ == "__main__":
    main()
