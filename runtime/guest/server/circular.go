package server

// circular keeps the last bytes that were put into it. Positions count all bytes ever put
// into it. The zero value is ready. It is not safe for concurrent use.
type circular struct {
	buf        []byte // a power of two long
	start, end int64  // positions of the stored bytes; the owner moves start before it puts more than fits
}

// circularStart is the memory for what is short.
const circularStart = 2 << 10

// grow makes space for n more bytes, up to limit, a power of two. It returns
// how many bytes have to be dropped for the rest.
func (c *circular) grow(n int, limit int) (drop int64) {
	need := c.end - c.start + int64(n)
	if size := len(c.buf); need > int64(size) && size < limit {
		size = max(circularStart, size)
		for int64(size) < need && size < limit {
			size *= 2
		}
		c.resize(size)
	}
	return max(0, need-int64(len(c.buf)))
}

func (c *circular) put(b []byte) {
	for len(b) > 0 {
		n := copy(c.buf[c.end&int64(len(c.buf)-1):], b)
		b, c.end = b[n:], c.end+int64(n)
	}
}

// part is what lies in one piece between two positions.
func (c *circular) part(from, to int64) []byte {
	start := from & int64(len(c.buf)-1)
	return c.buf[start:min(start+to-from, int64(len(c.buf)))]
}

// appendTo appends what lies between two positions to b.
func (c *circular) appendTo(b []byte, from, to int64) []byte {
	for from < to {
		part := c.part(from, to)
		b, from = append(b, part...), from+int64(len(part))
	}
	return b
}

// resize moves the stored bytes to a buffer of size bytes, a power of two, which has space for them.
func (c *circular) resize(size int) {
	other := circular{buf: make([]byte, size), start: c.start, end: c.start}
	for other.end < c.end {
		other.put(c.part(other.end, c.end))
	}
	*c = other
}
