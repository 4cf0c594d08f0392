"""A CUDA C++ module as one translation unit for g++: includes expanded, shared memory declared in C++ terms.

The text is wrapped in an unnamed namespace, because g++ puts a guard zone around a `__shared__` array (a static
variable here) only where it has internal linkage, and in a template it has it only there.

A header may be named by a macro, and `__has_include` asks whether the module's own folders hold one. Which branch of an
`#if` is taken only g++ knows, so a macro that has several values when it names a header is refused.

g++ does not report accesses that it knows to lie inside a static variable, as those at constant indices. So `__shared__
float tile[64];` becomes a variable of another name and a reference to it, `tile`, whose address g++ does not know.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"].*$')
_MACRO_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]+([A-Za-z_]\w*)[ \t]*$")
_HAS_INCLUDE = re.compile(r'\b__has_include\s*\(\s*(?:([<"])([^>"]+)[>"]|([A-Za-z_]\w*))\s*\)')
# #define NAME <header>, or "header", or the name of another such macro
_DEFINE = re.compile(r'^[ \t]*#[ \t]*define[ \t]+([A-Za-z_]\w*)[ \t]+(<[^>]+>|"[^"]+"|[A-Za-z_]\w*)[ \t]*$')
_PRAGMA_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once\b")
_ALIGN = r"__align__\s*\([^()]*\)"
# [alignas(16)] extern __shared__ [__align__(16)] float4 name[];
_DYNAMIC_SHARED = re.compile(
    rf"(?:(?:{_ALIGN}|alignas\s*\([^()]*(?:\([^()]*\))?[^()]*\))\s*)?\bextern\s+(?:{_ALIGN}\s*)?__shared__\s+(?:{_ALIGN}\s*)?"
    rf"([\w:<>,\s]+?)\s*(?:{_ALIGN}\s*)?\b(\w+)\s*\[\s*\]\s*;"
)
_GLOBAL_FUNCTION = re.compile(r"__global__\b(?P<between>[^;{}]*?)\b(?P<name>\w+)\s*\(", re.DOTALL)


@dataclass
class HostSource:
    """`text` of the module, the `system` headers it includes, and where it declares static shared memory."""

    text: str
    system: list[str] = field(default_factory=list)
    shared_lines: list[tuple[str, int, int]] = field(default_factory=list)  # (file, first line, last line)
    macros: dict[str, set[str]] = field(default_factory=dict)  # what the macros that may name a header stand for


def expand(code: str, name: str, include_dirs: Sequence[Path], defines: Sequence[str] = ()) -> HostSource:
    """The module `code` (called `name` in messages) with every header found in `include_dirs` put in its place.

    defines: the compiler's options -DNAME=VALUE. Raises ValueError for an `#include` of a macro of several values.
    """
    source = HostSource("")
    for option in defines:
        macro, equals, value = option.removeprefix("-D").partition("=")
        if option.startswith("-D") and equals:
            source.macros[macro] = {value}
    lines: list[str] = []
    _expand_file(code, name, include_dirs, (), source, lines)
    source.text = "\n".join(lines) + "\n"
    return source


def _expand_file(
    code: str, name: str, dirs: Sequence[Path], stack: tuple[Path, ...], source: HostSource, out: list[str]
) -> None:
    code = _hide_shared(_host_terms(code))
    plain = without_comments(code)
    source.shared_lines += [(name, *span) for span in _shared_declarations(plain)]
    guard = f"CUDA_HOST_ONCE_{re.sub(r'[^A-Za-z0-9]', '_', str(stack[-1]))}" if stack else ""
    once = bool(guard) and any(_PRAGMA_ONCE.match(line) for line in plain.split("\n"))
    if once:
        out += [f"#ifndef {guard}", f"#define {guard}"]
    out.append(f'#line 1 "{name}"')
    for number, (line, bare) in enumerate(zip(code.split("\n"), plain.split("\n"), strict=True), start=1):
        if "#" not in bare:
            out.append(line)
            continue
        _note_macro(line, source)
        header = _included(line, bare, f"{name}:{number}", source)
        if header is None:
            folders = [*(s.parent for s in stack[-1:]), *dirs]
            out.append("" if _PRAGMA_ONCE.match(bare) else _answer_has_include(line, folders, source))
            continue
        path = _find(header[1:-1], [*(s.parent for s in stack[-1:] if header[0] == '"'), *dirs])
        if path is None:
            source.system.append(header[1:-1])
            out.append("")
        elif path not in stack:
            _expand_file(path.read_text(), path.name, dirs, (*stack, path), source, out)
            out.append(f'#line {number + 1} "{name}"')
    if once:
        out.append("#endif")


def _note_macro(line: str, source: HostSource) -> None:
    define = _DEFINE.match(without_comments(line, strings=False))
    if define is not None:
        source.macros.setdefault(define[1], set()).add(define[2])


def _included(line: str, bare: str, where: str, source: HostSource) -> str | None:
    """`"header"` or `<header>` of an #include; None where the line is none, or names nothing known here."""
    include = _INCLUDE.match(line)
    if include is not None:
        return include[1] + include[2] + {"<": ">", '"': '"'}[include[1]]
    named = _MACRO_INCLUDE.match(bare)
    if named is None:
        return None
    values = _headers_named(named[1], source)
    if len(values) > 1:
        raise ValueError(
            f"code must include a header by its name, or by a macro of one value: {where}: {named[1]} is "
            + " or ".join(sorted(values))
        )
    return values.pop() if values else None  # none is g++'s to refuse, where the line is reached at all


def _headers_named(macro: str, source: HostSource, depth: int = 8) -> set[str]:
    """The headers that `macro` may stand for, through other macros too."""
    values = source.macros.get(macro, set()) if depth else set[str]()
    found: set[str] = set()
    for value in values:
        found |= {value} if value[0] in '<"' else _headers_named(value, source, depth - 1)
    return found


def _answer_has_include(line: str, folders: Sequence[Path], source: HostSource) -> str:
    """The line with 1 for `__has_include` of a header of ours, which g++ would not find; any other is left to g++."""

    def answer(match: re.Match[str]) -> str:
        headers = {match[2]} if match[2] else {header[1:-1] for header in _headers_named(match[3], source)}
        return "1" if headers and all(_find(header, folders) for header in headers) else match[0]

    return _HAS_INCLUDE.sub(answer, line)


def _find(header: str, folders: Iterable[Path]) -> Path | None:
    for folder in folders:
        path = (folder / header).resolve()
        if path.is_file() and not is_toolkit(folder):
            return path
    return None


def is_toolkit(folder: Path) -> bool:
    """Whether `folder` holds NVIDIA's headers, which are included as they are."""
    return (folder / "cuda_fp16.h").is_file() or (folder / "cuda" / "std").is_dir()


def _host_terms(code: str) -> str:
    """Rewrites the declarations that no macro can express, each within its own lines."""

    def dynamic(match: re.Match[str]) -> str:
        kind, name = match[1].strip(), match[2]
        lines = "\n" * match[0].count("\n")
        return f"{kind}* const {name} = reinterpret_cast<{kind}*>(cuda_host::dynamic_shared);{lines}"

    code = _DYNAMIC_SHARED.sub(dynamic, code)
    return re.sub(r"\bstatic(\s+)__shared__|__shared__(\s+)static\b", r"__shared__\1\2", code)


HIDDEN = "__hidden"  # ends the name of what a reference to a shared variable hides; the runtime takes it off again


def _hide_shared(code: str) -> str:
    """Adds a reference behind each declaration of static shared memory, on its last line."""
    plain = without_comments(code)
    for match in reversed(list(re.finditer(r"\b__shared__\b", plain))):
        before = plain[plain.rfind("\n", 0, match.start()) + 1 : match.start()]
        if before.lstrip().startswith("#") or before.rstrip().endswith("extern"):
            continue
        end = _end_of_declaration(plain, match.end())
        names = _declared_names(plain, match.end(), end)
        if names is None:  # nothing that could be renamed: its accesses at constant indices stay unseen
            continue
        references = "".join(f" auto& {n} = cuda_host::hidden({n}{HIDDEN});" for n, _ in names)
        code = code[: end + 1] + references + code[end + 1 :]
        for _, at in reversed(names):
            code = code[:at] + HIDDEN + code[at:]
    return code


def _end_of_declaration(plain: str, start: int) -> int:
    depth = 0
    for i in range(start, len(plain)):
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(plain[i], 0)
        if plain[i] == ";" and depth == 0:
            return i
    return len(plain)


def _declared_names(plain: str, start: int, end: int) -> list[tuple[str, int]] | None:
    """Each name that plain[start:end] declares, and where it ends; None where it is no list of variables and arrays."""
    names: list[tuple[str, int]] = []
    depth, last = 0, None
    for word in re.finditer(r"\w+|\S", plain[start:end] + ","):
        token = word[0]
        if depth == 0 and token in ",[":
            if last is None:
                return None
            if not names or names[-1] != last:
                names.append(last)
        if token == "(" and depth == 0 and last is not None and last[0] not in ("__align__", "alignas", "decltype"):
            return None
        if token in "([{<":
            depth += 1
        elif token in ")]}>":
            depth -= 1
        elif depth == 0 and (token[0].isalnum() or token[0] == "_"):
            last = token, start + word.end()
        elif depth == 0 and token not in ",*&:":
            return None
    return names or None


def without_comments(code: str, *, strings: bool = True) -> str:
    """`code` with comments and the contents of `strings` blanked, every line and column kept (`extern "C"` too)."""

    def blank(match: re.Match[str]) -> str:
        text = match[0]
        if text == '"C"' or (text[0] in "\"'" and not strings):
            return text
        return re.sub(r"[^\n]", " ", text)

    return _COMMENT_OR_STRING.sub(blank, code)


def _shared_declarations(plain: str) -> Iterable[tuple[int, int]]:
    for match in re.finditer(r"\b__shared__\b", plain):
        end = plain.find(";", match.end())
        yield plain.count("\n", 0, match.start()) + 1, plain.count("\n", 0, max(end, match.end())) + 1


def parameter_names(text: str, kernel: str) -> list[str]:
    """The parameter names of `__global__ void kernel(...)` in the expanded text; empty if it is not found."""
    plain = without_comments(text)
    for match in _GLOBAL_FUNCTION.finditer(plain):
        start = match.end()
        if match["name"] == "__launch_bounds__":  # ... __launch_bounds__(128) kernel(
            name = re.compile(r"[^;{}]*?\b(\w+)\s*\(").match(plain, _closing(plain, start) + 1)
            if name is None:
                continue
            found, start = name[1], name.end()
        else:
            found = match["name"]
        if found == kernel:
            return [_declared_name(p) for p in _split(plain[start : _closing(plain, start)])]
    return []


def has_c_linkage(text: str, kernel: str) -> bool:
    """Whether `kernel` is declared `extern "C"`, so that its plain name can be looked up."""
    plain = without_comments(text)
    declared = rf'extern\s+"C"\s[^;{{}}]*?\b__global__\b[^;{{}}]*?\b{re.escape(kernel)}\s*\('
    return bool(re.search(declared, plain) or re.search(r'extern\s+"C"\s*\{', plain))


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one before `start`."""
    depth = 1
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    return len(text)


def _split(parameters: str) -> list[str]:
    parts, depth = [""], 0
    for character in parameters:
        depth += {"(": 1, "<": 1, "[": 1, ")": -1, ">": -1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [p for p in parts if p.strip()]


def _declared_name(parameter: str) -> str:
    words = re.findall(r"\w+", re.sub(r"\[.*|=.*", "", parameter, flags=re.DOTALL))
    return words[-1] if words else "?"
