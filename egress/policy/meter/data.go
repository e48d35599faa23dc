package meter

import (
	"errors"
	"slices"
)

// maxGap is the longest run of zeros that is written in place of another segment, which
// takes about as many bytes in a compiler.
const maxGap = 64

// joinData joins the segments that fill memory when an instance starts. Go's linker
// omits runs of zeros, so that its smallest policy has 30,000 segments, and every instance
// evaluates and stores each of them.
//
// Segments stay unchanged if the program could notice: if some are passive, or if the module
// has their number, without which code cannot refer to segments. The compiler reports
// invalid ones.
func (m *parser) joinData(r *reader) []byte {
	n := r.count("data segments", maxSegments)
	s := &reader{data: r.data, at: r.at, err: r.err}
	r.at = len(r.data)
	if len(m.sections[countSection]) > 0 {
		return r.data
	}
	// Zeros between segments take more than what they replace: a third more with Go.
	j := joiner{out: make([]byte, constBytes, constBytes+len(r.data)+len(r.data)*3/8)}
	for range n {
		j.add(s)
	}
	if s.err != nil || s.left() > 0 {
		return r.data
	}
	j.finish()
	putConst(j.out, uint32(j.segments))
	return j.out
}

// joiner joins segments with small gaps between them: the bytes of a gap are zero, unless
// an earlier segment has filled them.
type joiner struct {
	out      []byte   // space for the number of segments, and the segments
	segments int      // in out
	begun    bool     // the last one can be extended:
	offset   uint64   // where it begins in memory
	content  int      // where its content begins in out, behind its length
	filled   []extent // by the segments before it
}

// extent of memory, without its end.
type extent struct{ from, to uint64 }

// maxExtents are compared. Modules of compilers have five or so.
const maxExtents = 64

var errOtherSegment = errors.New("a segment of another kind")

func (j *joiner) add(r *reader) {
	if r.u32() != 0 || r.byte() != 0x41 { // memory 0 at i32.const
		r.fail(errOtherSegment)
		return
	}
	offset := uint64(r.i32())
	if r.byte() != 0x0b || offset >= 1<<31 { // end; more than a memory may have
		r.fail(errOtherSegment)
		return
	}
	data := r.next(r.u32())
	if at := j.offset + uint64(len(j.out)-j.content); j.begun && offset >= at && offset-at <= maxGap && j.isZero(extent{at, offset}) {
		j.out = append(j.out, zeros[:offset-at]...)
	} else {
		j.finish()
		j.begin(offset)
	}
	j.out = append(j.out, data...)
}

var zeros [maxGap]byte

// begin writes the head of a segment, whose length is not known yet.
func (j *joiner) begin(offset uint64) {
	j.begun, j.offset = true, offset
	j.out = appendConst(append(j.out, 0, 0x41), uint32(offset))
	j.out = appendConst(append(j.out, 0x0b), 0)
	j.content = len(j.out)
}

// isZero reports whether no segment in out overlaps the gap.
func (j *joiner) isZero(gap extent) bool {
	return len(j.filled) <= maxExtents &&
		!slices.ContainsFunc(j.filled, func(e extent) bool { return gap.from < e.to && e.from < gap.to })
}

// finish writes the length of the last segment.
func (j *joiner) finish() {
	if !j.begun {
		return
	}
	size := len(j.out) - j.content
	putConst(j.out[j.content-constBytes:], uint32(size))
	j.segments++
	if len(j.filled) <= maxExtents {
		j.filled = append(j.filled, extent{j.offset, j.offset + uint64(size)})
	}
	j.begun = false
}
