"""Compile the blocks of a Bloom filter: 512 bits, a cache line, of which an item sets 8.

It sets one bit in each of the 8 words of a block, so that one vector instruction makes all of them
and another asks for all of them (Putze, Sanders, Singler, Cache-, Hash- and Space-Efficient Bloom
Filters, 2007; Parquet's split block Bloom filters do the same with words of 32 bits).
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from headrace.data.quality.bands import BLOCK_WORDS
from headrace.data.quality.ngrams import U3, U32, U, loop, mixed

ANOTHER = U(0xA0761D6478BD642F)
BIT = ir.VectorType(ir.IntType(64), BLOCK_WORDS)


@intrinsic
def fetch(_context, array, index):
    """Ask for the cache line of an element, which is written soon, and go on meanwhile."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        builder.call(function, [address, number(1), number(3), number(1)])  # to write, keep, data
        return context.get_dummy_value()

    return types.void(array, index), generate


def _block(builder, data, arguments):
    """Return where a block begins, what it holds, and the bit of each word that a hash sets."""
    place = builder.bitcast(builder.gep(data, [arguments[1]]), BIT.as_pointer())
    number, nothing = ir.IntType(32), ir.Constant(BIT, ir.Undefined)
    every = ir.Constant(ir.VectorType(number, BLOCK_WORDS), [0] * BLOCK_WORDS)
    hashes = builder.insert_element(nothing, arguments[2], number(0))
    hashes = builder.shuffle_vector(hashes, nothing, every)
    parts = builder.lshr(hashes, ir.Constant(BIT, [6 * word for word in range(BLOCK_WORDS)]))
    shifts = builder.and_(parts, ir.Constant(BIT, [63] * BLOCK_WORDS))
    bits = builder.shl(ir.Constant(BIT, [1] * BLOCK_WORDS), shifts)
    return place, builder.load(place, align=8), bits


@intrinsic
def has_bits(_context, blocks, block, bits):
    """Return 1 where a block has the bits of a hash, else 0."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        _, kept, wanted = _block(builder, data, arguments)
        missing = builder.and_(wanted, builder.not_(kept))
        zeros = ir.Constant(BIT, [0] * BLOCK_WORDS)
        words = builder.bitcast(
            builder.icmp_unsigned("!=", missing, zeros), ir.IntType(BLOCK_WORDS)
        )
        none = builder.icmp_unsigned("==", words, ir.Constant(words.type, 0))
        return builder.zext(none, ir.IntType(64))

    return types.uint64(blocks, block, bits), generate


@intrinsic
def set_bits(_context, blocks, block, bits):
    """Set the bits of a hash in a block."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place, kept, wanted = _block(builder, data, arguments)
        builder.store(builder.or_(kept, wanted), place, align=8)
        return context.get_dummy_value()

    return types.void(blocks, block, bits), generate


@loop
def block_of(blocks, x):
    """Return the first word of an n-gram's block."""
    return ((x >> U32) * U(blocks.size // BLOCK_WORDS)) >> U32 << U3


@loop
def is_in(blocks, x):
    """Return 1 where all bits of an n-gram are set, else 0."""
    block, bits = block_of(blocks, x), mixed(x * ANOTHER)
    return has_bits(blocks, block, bits)  # pyright: ignore[reportCallIssue]


@loop
def insert(blocks, x):
    """Set all bits of an n-gram; return 1 where one of them was not set, else 0."""
    block, bits = block_of(blocks, x), mixed(x * ANOTHER)
    was_in = has_bits(blocks, block, bits)  # pyright: ignore[reportCallIssue]
    set_bits(blocks, block, bits)  # pyright: ignore[reportCallIssue]
    return U(1) - was_in
