package server

import (
	"encoding/binary"

	"github.com/doze-run/doze/runtime/guest"
)

const (
	// ringSize bounds the output of a process in memory.
	ringSize = 256 << 10
	// ringStart is the memory for a process that writes little.
	ringStart = 2 << 10
	// ringRecord bounds one record, so that one write never displaces much.
	ringRecord = 8 << 10
)

// ring keeps the last frames of a process's output, as they go over the wire,
// in at most ringSize bytes. Positions count all bytes ever written to it. The
// zero value is ready. It is not safe for concurrent use.
type ring struct {
	buf  []byte      // a power of two long
	head logPosition // of the oldest frame
	tail int64       // position of the end
}

// logPosition is where a frame begins.
type logPosition struct {
	at     int64 // position
	output int64 // bytes of payload before it
}

// after returns the position after a frame of so many bytes.
func (p logPosition) after(frame int64) logPosition {
	return logPosition{p.at + frame, p.output + frame - guest.FrameHeader}
}

// add appends a frame of at most ringRecord bytes of payload, dropping the
// oldest ones when there is no room.
func (r *ring) add(t guest.FrameType, data []byte) {
	need := int64(guest.FrameHeader + len(data))
	for r.tail-r.head.at+need > int64(len(r.buf)) && len(r.buf) < ringSize {
		r.grow()
	}
	for r.tail-r.head.at+need > int64(len(r.buf)) {
		r.head = r.head.after(r.frame(r.head.at))
	}
	var header [guest.FrameHeader]byte
	guest.PutFrameHeader(header[:], t, len(data))
	r.put(header[:])
	r.put(data)
}

func (r *ring) grow() {
	bigger := ring{buf: make([]byte, max(ringStart, 2*len(r.buf))), head: r.head, tail: r.head.at}
	for bigger.tail < r.tail {
		bigger.put(r.part(bigger.tail, r.tail))
	}
	*r = bigger
}

func (r *ring) put(b []byte) {
	for len(b) > 0 {
		n := copy(r.buf[r.tail&int64(len(r.buf)-1):], b)
		b, r.tail = b[n:], r.tail+int64(n)
	}
}

// part is what lies in one piece between two positions.
func (r *ring) part(from, to int64) []byte {
	start := from & int64(len(r.buf)-1)
	return r.buf[start:min(start+to-from, int64(len(r.buf)))]
}

// frame is the length of the frame at a position, with its header.
func (r *ring) frame(at int64) int64 {
	var header [guest.FrameHeader]byte
	n := copy(header[:], r.part(at, at+guest.FrameHeader))
	copy(header[n:], r.part(at+int64(n), at+guest.FrameHeader))
	return guest.FrameHeader + int64(binary.BigEndian.Uint32(header[1:]))
}

// read appends whole frames from a position on to b, as many as fit in its capacity. It
// returns the position after them and how many bytes of output before them were dropped.
func (r *ring) read(from logPosition, b []byte) (frames []byte, next logPosition, skipped int64) {
	if from.at < r.head.at {
		skipped, from = r.head.output-from.output, r.head
	}
	for from.at < r.tail {
		length := r.frame(from.at)
		if len(b)+int(length) > cap(b) {
			break
		}
		for at, end := from.at, from.at+length; at < end; {
			part := r.part(at, end)
			b = append(b, part...)
			at += int64(len(part))
		}
		from = from.after(length)
	}
	return b, from, skipped
}
