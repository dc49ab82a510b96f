"""Compile looks at many bytes at once: a vector instruction folds or compares 32 of them.

LLVM makes two or four instructions of one where a processor has shorter vectors. Bit and byte 0 are
those of the first byte, as on every processor for which Numba compiles.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

FOLDED, LOOKED_AT = 32, 64
"""Bytes that `fold` reads and writes, and that `letter_bits` reads."""
BYTE = ir.IntType(8)


def _address(context, builder, signature, arguments, number):
    """Return the address of an element: argument `number` is an array, the next one an index."""
    array = context.make_array(signature.args[number])(context, builder, arguments[number])
    return builder.gep(array.data, [arguments[number + 1]])


def _load(builder, address, kind):
    """Return what stands at an address, however it is aligned."""
    return builder.load(builder.bitcast(address, kind.as_pointer()), align=1)


@intrinsic
def fold(_context, text, at, spelled, count):
    """Write `FOLDED` characters of ASCII: letters in lower case, digits, and 0 for all others.

    Return 1; 0 where one of them is not ASCII, and then what was written means nothing.
    """

    def generate(context, builder, signature, arguments):
        kind = ir.VectorType(BYTE, FOLDED)

        def every(value):
            return ir.Constant(kind, [value] * FOLDED)

        def is_one_of(values, first, last):
            place = builder.sub(values, every(ord(first)))
            return builder.icmp_unsigned("<=", place, every(ord(last) - ord(first)))

        raw = _load(builder, _address(context, builder, signature, arguments, 0), kind)
        lower = builder.or_(raw, every(0x20))
        digits = builder.select(is_one_of(raw, "0", "9"), raw, every(0))
        folded = builder.select(is_one_of(lower, "a", "z"), lower, digits)
        target = _address(context, builder, signature, arguments, 2)
        builder.store(folded, builder.bitcast(target, kind.as_pointer()), align=1)
        others = builder.bitcast(builder.icmp_signed("<", raw, every(0)), ir.IntType(FOLDED))
        none = builder.icmp_unsigned("==", others, ir.Constant(others.type, 0))
        return builder.zext(none, ir.IntType(64))

    return types.uint64(text, at, spelled, count), generate


@intrinsic
def letter_bits(_context, spelled, at):
    """Return a bit for each of `LOOKED_AT` bytes that is not 0."""

    def generate(context, builder, signature, arguments):
        kind = ir.VectorType(BYTE, LOOKED_AT)
        raw = _load(builder, _address(context, builder, signature, arguments, 0), kind)
        there = builder.icmp_unsigned("!=", raw, ir.Constant(kind, [0] * LOOKED_AT))
        return builder.bitcast(there, ir.IntType(LOOKED_AT))

    return types.uint64(spelled, at), generate


@intrinsic
def eight_bytes(_context, spelled, at):
    """Return 8 bytes as one number."""

    def generate(context, builder, signature, arguments):
        address = _address(context, builder, signature, arguments, 0)
        return _load(builder, address, ir.IntType(64))

    return types.uint64(spelled, at), generate


@intrinsic
def first_bit(_context, bits):
    """Return the place of the lowest bit that is set, 64 where none is."""

    def generate(_context, builder, _signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(bits), generate
