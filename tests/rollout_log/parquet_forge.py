"""Forge Parquet files byte by byte with content that no writer produces: runs of a billion values, false counts.

A file has columns of one row group. Types are Thrift compact protocol types.
"""

import struct

I32, I64, BINARY, LIST, STRUCT = 5, 6, 8, 9, 12
FLOAT, BYTE_ARRAY = 4, 6
ZSTD = 6


def varint(number):
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def integer(number):
    return varint(number * 2 if number >= 0 else -number * 2 - 1)


def structure(*fields):
    """Fields are (number, type, value); the value of a list or structure is its bytes."""
    out, last = b"", 0
    for number, kind, value in fields:
        out += bytes([(number - last) << 4 | kind])
        last = number
        if kind in (I32, I64):
            value = integer(value)
        elif kind == BINARY:
            value = varint(len(value)) + value.encode()
        out += value
    return out + b"\0"


def array(kind, items):
    items = list(items)
    if kind in (I32, I64):
        items = [integer(item) for item in items]
    elif kind == BINARY:
        items = [varint(len(item)) + item.encode() for item in items]
    head = bytes([len(items) << 4 | kind]) if len(items) < 15 else bytes([15 << 4 | kind]) + varint(len(items))
    return head + b"".join(items)


def levels(*runs):
    """Runs of (level, count)."""
    content = b"".join(varint(count << 1) + bytes([level]) for level, count in runs)
    return struct.pack("<I", len(content)) + content


def page(body, kind, header_number, *header, codec=None):
    stored = codec.compress(body, asbytes=True) if codec else body
    return (
        structure(
            (1, I32, kind), (2, I32, len(body)), (3, I32, len(stored)), (header_number, STRUCT, structure(*header))
        )
        + stored
    )


def dictionary_page(body, values, codec=None):
    return page(body, 2, 7, (1, I32, values), (2, I32, 0), codec=codec)


def data_page(body, values, *, encoding=8, codec=None):
    return page(body, 0, 5, (1, I32, values), (2, I32, encoding), (3, I32, 3), (4, I32, 3), codec=codec)


def column(name, pages, values, *, dictionary=b"", nested=1, kind=FLOAT, codec=0, extra=()):
    """A column of lists, of lists in lists, or (`nested=0`) of single values."""
    return locals()


def repeated(name, *runs, claimed=None, pages=1, **options):
    """A list column of one value, repeated: `runs` are its repetition levels."""
    count = sum(length for _, length in runs)
    one = dictionary_page(struct.pack("<f", -0.5), 1)
    body = levels(*runs) + levels((3, count)) + b"\1" + varint(count << 1) + b"\0"
    total = count * pages if claimed is None else claimed
    return column(name, data_page(body, count) * pages, total, dictionary=one, **options)


def schema_of(columns):
    elements = [structure((4, BINARY, "schema"), (5, I32, len(columns)))]
    for each in columns:
        name = each["name"]
        for _ in range(each["nested"]):
            elements.append(structure((3, I32, 1), (4, BINARY, name), (5, I32, 1), (6, I32, 3)))
            elements.append(structure((3, I32, 2), (4, BINARY, "list"), (5, I32, 1)))
            name = "element"
        text = [(6, I32, 0)] if each["kind"] == BYTE_ARRAY else []
        elements.append(structure((1, I32, each["kind"]), (3, I32, 1), (4, BINARY, name), *text))
    return elements


def parquet(columns, rows):
    out, chunks = b"PAR1", []
    for each in columns:
        start, content = len(out), each["dictionary"] + each["pages"]
        out += content
        path = [each["name"], *["list", "element"] * each["nested"]]
        places = [(9, I64, start + len(each["dictionary"]))]
        places += [(11, I64, start)] if each["dictionary"] else []
        metadata = structure(
            (1, I32, each["kind"]),
            (2, LIST, array(I32, [0, 3, 8])),
            (3, LIST, array(BINARY, path)),
            (4, I32, each["codec"]),
            (5, I64, each["values"]),
            (6, I64, len(content)),
            (7, I64, len(content)),
            *places,
            *each["extra"],
        )
        chunks.append(structure((2, I64, start), (3, STRUCT, metadata)))
    group = structure((1, LIST, array(STRUCT, chunks)), (2, I64, 100), (3, I64, rows))
    return with_footer(out, schema_of(columns), [group], rows)


def with_footer(start, schema, groups, rows, *, claimed=None):
    footer = structure((1, I32, 1), (2, LIST, array(STRUCT, schema)), (3, I64, rows), (4, LIST, array(STRUCT, groups)))
    return start + footer + struct.pack("<I", len(footer) if claimed is None else claimed) + b"PAR1"
