package meter

import (
	"encoding/binary"
	"errors"
	"fmt"
	"unicode/utf8"
)

var errTruncated = errors.New("it ends too early")

// reader reads a part of a module. After the first error, every read returns zero, so that
// callers check for errors once after several reads.
type reader struct {
	data []byte
	at   int
	err  error
}

func (r *reader) fail(err error) {
	if r.err == nil {
		r.err = err
	}
	r.at = len(r.data)
}

func (r *reader) left() int { return len(r.data) - r.at }

func (r *reader) byte() byte {
	if r.at >= len(r.data) {
		r.fail(errTruncated)
		return 0
	}
	r.at++
	return r.data[r.at-1]
}

func (r *reader) next(n uint32) []byte {
	if uint64(n) > uint64(r.left()) {
		r.fail(errTruncated)
		return nil
	}
	r.at += int(n)
	return r.data[r.at-int(n) : r.at]
}

// leb128 reads a number of at most 5 bytes, and returns it with the number of its bits.
func (r *reader) leb128() (v uint64, bits int) {
	for bits < 35 {
		b := r.byte()
		v |= uint64(b&0x7f) << bits
		bits += 7
		if b < 0x80 {
			return v, bits
		}
	}
	r.fail(errLong)
	return 0, bits
}

var errLong = errors.New("a number is longer than 32 bits")

// u32 reads an unsigned number of at most 32 bits.
func (r *reader) u32() uint32 {
	v, _ := r.leb128()
	if v > 1<<32-1 {
		r.fail(errLong)
		return 0
	}
	return uint32(v)
}

// i32 reads a signed number of 32 bits, as the unsigned one of the same bits.
func (r *reader) i32() uint32 {
	v, bits := r.leb128()
	if v>>(bits-1) == 1 {
		v |= ^uint64(0) << bits
	}
	return uint32(v)
}

// skipSigned passes over a signed LEB128 of at most so many bytes.
func (r *reader) skipSigned(bytes int) {
	for range bytes {
		if r.byte() < 0x80 {
			return
		}
	}
	r.fail(errors.New("a number is too long"))
}

// count reads the length of a vector whose elements take at least one byte each.
func (r *reader) count(what string, limit int) int {
	n := r.u32()
	if uint64(n) > uint64(limit) {
		r.fail(fmt.Errorf("it has %d %s; use at most %d", n, what, limit))
		return 0
	}
	if int(n) > r.left() {
		r.fail(errTruncated)
		return 0
	}
	return int(n)
}

func (r *reader) name() string {
	b := r.next(r.u32())
	if !utf8.Valid(b) {
		r.fail(errors.New("a name is not UTF-8"))
	}
	return string(b)
}

func appendU32(b []byte, v uint32) []byte { return binary.AppendUvarint(b, uint64(v)) }

// constBytes is the length of a number that putConst writes.
const constBytes = 5

func appendConst(b []byte, v uint32) []byte {
	b = append(b, make([]byte, constBytes)...)
	putConst(b[len(b)-constBytes:], v)
	return b
}

// putConst writes a number below 1<<31 as a LEB128 of fixed length, the same signed and
// unsigned, into bytes that were reserved before the number was known.
func putConst(b []byte, v uint32) {
	for i := range constBytes - 1 {
		b[i] = byte(v>>(7*i))&0x7f | 0x80
	}
	b[constBytes-1] = byte(v>>28) & 0x07
}
