"""Words that a name of a spec must not become in C++."""

from __future__ import annotations

# Keywords and words with a meaning in some place, up to C++23.
_KEYWORDS = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t
char8_t class co_await co_return co_yield compl concept const const_cast consteval constexpr
constinit continue decltype default delete do double dynamic_cast else enum explicit export extern
false final float for friend goto if import inline int long module mutable namespace new noexcept
not not_eq nullptr operator or or_eq override private protected public register reinterpret_cast
requires return short signed sizeof static static_assert static_cast struct switch template this
thread_local throw true try typedef typeid typename union unsigned using virtual void volatile
wchar_t while xor xor_eq
"""
KEYWORDS = frozenset(_KEYWORDS.split())

# Macros in lower or mixed case that system headers, Windows or Qt define. Names that begin with
# two capitals are macros by custom: identifier() gives all of them a prefix.
_MACROS = """
L_ctermid L_cuserid L_tmpnam P_tmpdir alloca assert complex emit errno far foreach fpclassify htonl
htons i386 imaginary interface isfinite isinf isnan linux major makedev math_errhandling max min
minor near ntohl ntohs offsetof sa_handler sa_sigaction setjmp si_pid si_status si_uid si_value
sigmask signals signbit slots small st_atime st_ctime st_mtime stderr stdin stdout unix va_arg
va_copy va_end va_start
"""
MACROS = frozenset(_MACROS.split())

# Names that generated code uses itself, in some scope where a name of a spec may appear.
_OWN = """
Block Communicator Config ConfigValues EngineManager Options Tensor TensorContainer TensorShard
Weight accumulate add block c ceil_div checked_add checked_mul checked_sub config desc describe
floor_div floor_mod from get_block get_non_block gradgen gradients kKey kName layer
make_gradient_manager model models non_block out preset pybind11 require require_dim std validate
values weights
"""
OWN = frozenset(_OWN.split())
