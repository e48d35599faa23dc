package scrub

import (
	"io"
	"sync"
)

const (
	// pieceSize of a body that is searched in one go: the size of a TLS record, whose
	// bytes arrive together.
	pieceSize = 16 << 10
	// maxPending bounds what is held back: a key of 256 characters, each escaped
	// in the widest way (11 bytes, as &#x000002f;), or with \r\n between (10).
	maxPending = 4 << 10
	// maxEmpty reads without bytes or an error, one after the other: as bufio.
	maxEmpty = 100
)

var pieces = sync.Pool{New: func() any { return new([pieceSize + maxPending]byte) }}

// Body returns a reader of r without occurrences, however r's reads split them.
// It has as many bytes as r, and immediately passes on bytes that cannot be part of an
// occurrence whose first four characters have arrived.
func (s *Scrubber) Body(r io.Reader) io.Reader {
	if s == nil {
		return r
	}
	return &body{r: r, x: scan{s: s}}
}

type body struct {
	r   io.Reader
	err error // of r, for when all is out
	x   scan

	piece *[pieceSize + maxPending]byte // nil before the first and after the last
	out   []byte                        // of piece, to go out
	// pending are bytes that are searched again with the bytes that follow, because
	// an occurrence may begin in them. The first sent of them went out.
	pending []byte
	sent    int
}

func (b *body) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for empty := 0; len(b.out) == 0; {
		if b.err != nil {
			return 0, b.finishBody()
		}
		n, err := b.fill()
		if b.err = err; n > 0 || err != nil {
			empty = 0
		} else if empty++; empty == maxEmpty {
			return 0, io.ErrNoProgress
		}
	}
	n := copy(p, b.out)
	if b.out = b.out[n:]; len(b.out) == 0 && b.err != nil {
		return n, b.finishBody()
	}
	return n, nil
}

// finishBody releases the piece, and returns the error of r.
func (b *body) finishBody() error {
	if b.piece != nil {
		pieces.Put(b.piece)
		b.piece = nil
	}
	return b.err
}

// fill reads once, and has in out what may go out.
func (b *body) fill() (int, error) {
	if b.piece == nil {
		b.piece = pieces.Get().(*[pieceSize + maxPending]byte)
	}
	kept := copy(b.piece[:], b.pending)
	n, err := b.r.Read(b.piece[kept : kept+pieceSize])
	text := b.piece[:kept+n]

	x := &b.x
	x.text, x.final = text, err != nil
	x.run(0)
	end := max(x.held, b.sent)
	for _, t := range x.tails {
		end = min(end, t.at) // an escape that is not whole
	}
	x.retain = min(x.retain, end)

	b.pending = append(b.pending[:0], text[x.retain:]...)
	x.spans.star(text, b.sent, end)
	b.out = text[b.sent:end]
	b.sent = end - x.retain
	x.spans = x.spans.from(end, x.retain)
	for i := range x.tails {
		x.tails[i].at -= x.retain
	}
	x.until -= x.retain
	return n, err
}
