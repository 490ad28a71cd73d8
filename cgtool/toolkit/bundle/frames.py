"""The frame of zstd around an archive: exactly one, whole, and of bounded size. Must not import torch.

Frame, of which only the outline is read here (RFC 8878)::

    frame  = magic 4 | descriptor 1 | [window 1] | [dictionary 0-4] | [content size 0-8] | block+ | [checksum 4]
    block  = 3 bytes, little end first: last (1 bit), type (2 bits), size (21 bits) | content

So the end of the frame is known without unpacking it, what follows it is seen, and a source is never read past it.
"""

from __future__ import annotations

from typing import IO, Any

from cgtool.store.bundle_index import Limits, refused
from cgtool.toolkit.bundle.tar import CHUNK_BYTES

_MAGIC = b"\x28\xb5\x2f\xfd"
_DICTIONARY_BYTES = (0, 1, 2, 4)
_RLE, _RESERVED = 1, 3
#: A packer of ours never looks further back; more would be memory that a stranger asks for.
_MAX_WINDOW_BYTES = 2**27


class OneFrame:
    """The bytes of the one frame that a source holds.

    Args:
        source: Where they come from; a pipe serves.

    Attributes:
        num_bytes: How many were handed out.
    """

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._ended = False
        self._checksum = 0
        self._started = False
        self.num_bytes = 0

    def read(self, size: int = -1, /) -> bytes:
        """Return the next blocks, about `size` bytes of them; none after the frame's end.

        Raises:
            RefusedError: It is no frame of zstd, or is cut short.
        """
        found = bytearray()
        wanted = CHUNK_BYTES if size < 0 else size
        while not self._ended and len(found) < wanted:
            found += self._block() if self._started else self._header()
        self.num_bytes += len(found)
        return bytes(found)

    def check_end(self) -> None:
        """Check that the frame came to its end and nothing follows it.

        Raises:
            RefusedError: trailing_data.
        """
        while not self._ended:
            self.read()
        if self._source.read(1):
            raise refused("trailing_data", "goes on after its end")

    def _header(self) -> bytes:
        head = self._exactly(5, "not_a_bundle")
        descriptor = head[4]
        single = bool(descriptor & 0x20)
        if head[:4] != _MAGIC or descriptor & 0x08 or descriptor & 0x03:
            raise refused("not_a_bundle", "is not packed by zstd", advice="Name a file that cgtool export wrote.")
        flag = descriptor >> 6
        size_bytes = (1 if single else 0) if flag == 0 else 1 << flag
        self._checksum = 4 if descriptor & 0x04 else 0
        self._started = True
        return head + self._exactly((0 if single else 1) + _DICTIONARY_BYTES[descriptor & 3] + size_bytes)

    def _block(self) -> bytes:
        head = self._exactly(3)
        number = int.from_bytes(head, "little")
        last, kind, size = number & 1, number >> 1 & 3, number >> 3
        if kind == _RESERVED:
            raise refused("bad_compression", "is packed in a way that zstd does not know")
        if not size and not last:  # any number of them would come to nothing
            raise refused("bad_compression", "holds an empty block that is not the last")
        body = self._exactly(1 if kind == _RLE else size)
        if not last:
            return head + body
        tail = self._exactly(self._checksum)
        self._ended = True
        return head + body + tail

    def _exactly(self, count: int, reason: str = "truncated") -> bytes:
        found = b""
        while len(found) < count:
            chunk = self._source.read(count - len(found))
            if not chunk:
                raise refused(reason, "ends too early")
            found += chunk
        return found


class Unpacker:
    """Unpacks one frame, and refuses what grows out of all proportion.

    Args:
        source: Where the frame comes from.
        limits: What it may grow to.
    """

    def __init__(self, source: IO[bytes], limits: Limits) -> None:
        import zstandard  # milliseconds, and only for who reads a bundle

        self._error: type[Exception] = zstandard.ZstdError
        self._frame = OneFrame(source)
        self._limits = limits
        self._most = limits.max_bytes + limits.max_index_bytes + limits.max_members * 2 * 512
        self._num_bytes = 0
        maker: Any = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        self._stream = maker.stream_reader(self._frame, read_size=CHUNK_BYTES, read_across_frames=False)

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes; none at the end.

        Raises:
            RefusedError: bad_compression, truncated, bomb or not_a_bundle.
        """
        try:
            chunk: bytes = self._stream.read(size)
        except self._error as error:
            raise refused("bad_compression", "cannot be unpacked", actual=str(error)) from error
        self._num_bytes += len(chunk)
        ratio = self._num_bytes / max(self._frame.num_bytes, 1)
        grown = self._num_bytes > self._limits.ratio_from_bytes and ratio > self._limits.max_ratio
        if grown or self._num_bytes > self._most:
            advice = "Nothing was changed. Allow more with --max-ratio and --max-size where you expect so much."
            why = f"grows to more than {self._num_bytes} bytes from {self._frame.num_bytes}"
            raise refused("bomb", why, expected=self._limits.max_ratio, actual=round(ratio), advice=advice)
        return chunk

    def check_end(self) -> None:
        """Check that all was read and that nothing follows.

        Raises:
            RefusedError: trailing_data.
        """
        if self.read(1):
            raise refused("trailing_data", "holds something after its end")
        self._frame.check_end()
