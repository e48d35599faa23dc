// Package backup copies the data of a node, while it runs, into one file, and restores it.
//
// A backup has
//
//	the line "doze node backup"
//	a line of JSON, the Header
//	chunks: their length in 4 bytes, big-endian, and a part of a stream; a length of 0 ends it
//	SHA-256 of everything before, 32 bytes
//
// The stream is compressed with Zstandard. It has records: entries of the store, then files,
// and one that ends it. Lengths are varints:
//
//	1 | length of key | key | length of value | value
//	2 | length of name | name | size | content
//	3 | number of entries | number of files
//
// Entries are in the order of their keys, files in the order of their names. The values are
// the store's own, see package store.
package backup

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/store"
)

// Schema is the version of the format, the store's entries included. It changes when an
// earlier version of doze could not use a backup.
const Schema = 1

const magic = "doze node backup\n"

// Header describes a backup.
type Header struct {
	Schema  int       `json:"schema"`
	Version string    `json:"version"` // of doze
	Node    string    `json:"node"`    // its id
	Created time.Time `json:"created"`
	Commits uint64    `json:"commits"` // of the store
	// SealingKey reports whether the backup contains the key that its secrets are
	// encrypted with.
	SealingKey bool `json:"sealing_key"`
}

// Contents counts what a backup contains.
type Contents struct {
	Header
	Entries int `json:"entries"`
	Files   int `json:"files"`
}

// Errors of reading.
var (
	ErrFormat    = errors.New("it is not a backup of a node")
	ErrTruncated = errors.New("the backup is truncated: it has no end")
	ErrDamaged   = errors.New("the backup is damaged: its checksum is wrong")
)

// SchemaError reports a backup of a later version.
type SchemaError struct {
	Schema  int
	Version string
}

func (e *SchemaError) Error() string {
	return fmt.Sprintf("doze %.40s wrote the backup with schema %d, but this version reads schemas up to %d; restore it with that version or a later one",
		e.Version, e.Schema, Schema)
}

// Types of records.
const (
	recordEntry = 1
	recordFile  = 2
	recordEnd   = 3
)

const (
	maxHeader = 64 << 10
	maxChunk  = 1 << 20
	// maxName is more than the length of any key and any file's name.
	maxName = 2000
	// maxFile is the size of the largest file, which is a policy's module.
	maxFile = 16 << 20
	// window of the compression, which bounds the memory of both sides.
	window = 4 << 20
)

// writer writes a backup.
type writer struct {
	*zstd.Encoder
	chunks *chunkWriter
	counts [2]uint64 // of entries and files
}

func newWriter(w io.Writer, h Header) (*writer, error) {
	line, err := json.Marshal(h)
	if err != nil {
		return nil, err
	}
	sum := sha256.New()
	out := io.MultiWriter(w, sum)
	if _, err := fmt.Fprintf(out, "%s%s\n", magic, line); err != nil {
		return nil, err
	}
	chunks := &chunkWriter{w: w, out: out, sum: sum}
	z, err := zstd.NewWriter(chunks, zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(window))
	return &writer{Encoder: z, chunks: chunks}, err
}

func (w *writer) record(kind byte, parts ...[]byte) error {
	b := []byte{kind}
	for _, part := range parts {
		b = append(binary.AppendUvarint(b, uint64(len(part))), part...)
	}
	_, err := w.Write(b)
	return err
}

func (w *writer) entry(key, value []byte) error {
	w.counts[0]++
	return w.record(recordEntry, key, value)
}

func (w *writer) file(name string, size int64, content io.Reader) error {
	w.counts[1]++
	if err := w.record(recordFile, []byte(name)); err != nil {
		return err
	}
	if _, err := w.Write(binary.AppendUvarint(nil, uint64(size))); err != nil {
		return err
	}
	if _, err := io.CopyN(w, content, size); err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	return nil
}

// writeEnd writes the end. Without it, the backup is truncated.
func (w *writer) writeEnd() error {
	b := binary.AppendUvarint([]byte{recordEnd}, w.counts[0])
	if _, err := w.Write(binary.AppendUvarint(b, w.counts[1])); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	return w.chunks.writeEnd()
}

// chunkWriter writes a stream in chunks.
type chunkWriter struct {
	w, out io.Writer // out also writes to sum
	sum    hash.Hash
}

// Write implements io.Writer.
func (c *chunkWriter) Write(b []byte) (n int, err error) {
	for len(b) > 0 {
		part := b[:min(len(b), maxChunk)]
		if _, err := c.out.Write(binary.BigEndian.AppendUint32(nil, uint32(len(part)))); err != nil {
			return n, err
		}
		m, err := c.out.Write(part)
		n += m
		if err != nil {
			return n, err
		}
		b = b[len(part):]
	}
	return n, nil
}

func (c *chunkWriter) writeEnd() error {
	if _, err := c.out.Write(make([]byte, 4)); err != nil {
		return err
	}
	_, err := c.w.Write(c.sum.Sum(nil))
	return err
}

// visitor receives the records of a backup. Keys, values and content are valid until the call
// returns.
type visitor struct {
	entry func(key, value []byte) error
	file  func(name string, size int64, content io.Reader) error
}

// visitorError is an error of a visitor.
type visitorError struct{ error }

func (e visitorError) Unwrap() error { return e.error }

// Check reads a whole backup and verifies it.
//
// Errors: ErrFormat, ErrTruncated, ErrDamaged, *SchemaError (all wrapped), and the errors of r.
func Check(r io.Reader) (Contents, error) {
	return read(r, visitor{
		entry: func(_, _ []byte) error { return nil },
		file:  func(string, int64, io.Reader) error { return nil },
	})
}

// read is Check with a visitor, whose error ends it. The visitor receives records before the
// checksum is verified.
func read(r io.Reader, v visitor) (Contents, error) {
	in := &chunkReader{r: bufio.NewReaderSize(r, 64<<10), sum: sha256.New()}
	header, err := in.header()
	if err != nil {
		return Contents{}, err
	}
	contents := Contents{Header: header}
	invalid := contents.read(in, v)
	if failed, ok := errors.AsType[visitorError](invalid); ok {
		return Contents{}, failed.error
	}
	// A wrong byte may be the reason for any other error.
	if err := in.verify(); err != nil {
		return Contents{}, err
	}
	if invalid != nil {
		return Contents{}, fmt.Errorf("the backup is invalid: %w", invalid)
	}
	return contents, nil
}

// read reads the stream of records and counts them.
func (c *Contents) read(in *chunkReader, v visitor) error {
	z, err := zstd.NewReader(in, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(window), zstd.WithDecoderLowmem(true))
	if err != nil {
		return err
	}
	defer z.Close()
	records := &recordReader{Reader: bufio.NewReaderSize(z, 64<<10)}
	for {
		kind, err := records.ReadByte()
		if err != nil {
			return unexpected(err)
		}
		switch kind {
		case recordEntry:
			err = c.entry(records, v)
		case recordFile:
			err = c.file(records, v)
		case recordEnd:
			return c.readEnd(records)
		default:
			err = fmt.Errorf("unknown record %d", kind)
		}
		if err != nil {
			return err
		}
	}
}

func (c *Contents) entry(in *recordReader, v visitor) error {
	key, err := in.bytes(nil, maxName)
	if err != nil {
		return err
	}
	value, err := in.bytes(in.value, maxChunk)
	if err != nil {
		return err
	}
	in.value = value
	if c.Files > 0 || c.Entries > 0 && bytes.Compare(key, in.previous) <= 0 {
		return errors.New("an entry is out of order")
	}
	if err := store.CheckEntry(key, value); err != nil {
		return err
	}
	in.previous = key
	c.Entries++
	if err := v.entry(key, value); err != nil {
		return visitorError{err}
	}
	return nil
}

func (c *Contents) file(in *recordReader, v visitor) error {
	b, err := in.bytes(nil, maxName)
	if err != nil {
		return err
	}
	name := string(b)
	size, err := binary.ReadUvarint(in)
	if err != nil {
		return unexpected(err)
	}
	switch {
	case !isFile(name):
		return fmt.Errorf("unknown file %.200q", name)
	case size > maxFile:
		return fmt.Errorf("%s has %d bytes", name, size)
	case c.Files > 0 && name <= in.previousFile:
		return errors.New("a file is out of order")
	}
	in.previousFile = name
	c.Files++
	content := &io.LimitedReader{R: in, N: int64(size)}
	if err := v.file(name, int64(size), content); err != nil {
		return visitorError{err}
	}
	if _, err := io.Copy(io.Discard, content); err != nil {
		return unexpected(err)
	}
	if content.N > 0 {
		return io.ErrUnexpectedEOF
	}
	return nil
}

func (c *Contents) readEnd(in *recordReader) error {
	for _, want := range []int{c.Entries, c.Files} {
		count, err := binary.ReadUvarint(in)
		if err != nil {
			return unexpected(err)
		}
		if count != uint64(want) {
			return fmt.Errorf("it has %d records instead of %d", want, count)
		}
	}
	if _, err := in.ReadByte(); !errors.Is(err, io.EOF) {
		return errors.Join(errors.New("its stream continues after the last record"), err)
	}
	return nil
}

// unexpected returns io.ErrUnexpectedEOF for the end of a stream.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// recordReader reads records.
type recordReader struct {
	*bufio.Reader
	value        []byte // reused
	previous     []byte // key
	previousFile string
}

// bytes reads a length, and that many bytes into b if they fit.
func (r *recordReader) bytes(b []byte, limit uint64) ([]byte, error) {
	n, err := binary.ReadUvarint(r)
	if err != nil {
		return nil, unexpected(err)
	}
	if n > limit {
		return nil, fmt.Errorf("a length is %d", n)
	}
	if uint64(cap(b)) < n {
		b = make([]byte, n)
	}
	b = b[:n]
	_, err = io.ReadFull(r, b)
	return b, unexpected(err)
}

// chunkReader reads the stream from the chunks.
type chunkReader struct {
	r    *bufio.Reader
	sum  hash.Hash
	left int  // bytes of the chunk that are not read
	last bool // the end was read
	err  error
}

// header reads the first lines.
func (c *chunkReader) header() (h Header, err error) {
	start := make([]byte, len(magic))
	if n, err := io.ReadFull(c.r, start); err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) && bytes.HasPrefix([]byte(magic), start[:n]) {
			return h, ErrTruncated
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return h, ErrFormat
		}
		return h, err
	}
	if string(start) != magic {
		return h, ErrFormat
	}
	var line []byte
	for len(line) <= maxHeader {
		b, err := c.r.ReadByte()
		if errors.Is(err, io.EOF) {
			return h, ErrTruncated
		}
		if err != nil {
			return h, err
		}
		line = append(line, b)
		if b == '\n' {
			break
		}
	}
	c.sum.Write(start)
	c.sum.Write(line)
	if err := json.Unmarshal(line, &h); err != nil {
		return h, fmt.Errorf("%w: its header cannot be read", ErrDamaged)
	}
	if h.Schema > Schema {
		return h, &SchemaError{Schema: h.Schema, Version: h.Version}
	}
	if h.Schema < 1 || !sandbox.IsID(h.Node) {
		return h, fmt.Errorf("%w: its header is invalid", ErrDamaged)
	}
	return h, nil
}

// Read implements io.Reader.
func (c *chunkReader) Read(b []byte) (n int, err error) {
	for c.left == 0 && !c.last && c.err == nil {
		var length [4]byte
		if c.err = c.full(length[:]); c.err != nil {
			break
		}
		switch n := binary.BigEndian.Uint32(length[:]); {
		case n > maxChunk:
			c.err = ErrDamaged
		case n == 0:
			c.last = true
		default:
			c.left = int(n)
		}
	}
	switch {
	case c.err != nil:
		return 0, c.err
	case c.last:
		return 0, io.EOF
	}
	b = b[:min(len(b), c.left)]
	n, err = c.r.Read(b)
	c.sum.Write(b[:n])
	c.left -= n
	if errors.Is(err, io.EOF) {
		err = ErrTruncated
	}
	c.err = err
	return n, err
}

// full reads bytes that are not part of the stream.
func (c *chunkReader) full(b []byte) error {
	_, err := io.ReadFull(c.r, b)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return ErrTruncated
	}
	c.sum.Write(b)
	return err
}

// verify reads the rest of the chunks, and verifies the checksum.
func (c *chunkReader) verify() error {
	if _, err := io.Copy(io.Discard, c); err != nil {
		return err
	}
	want := c.sum.Sum(nil)
	have := make([]byte, len(want))
	if err := c.full(have); err != nil {
		return err
	}
	if !bytes.Equal(have, want) {
		return ErrDamaged
	}
	switch _, err := c.r.ReadByte(); {
	case errors.Is(err, io.EOF):
		return nil
	case err != nil:
		return err
	}
	return fmt.Errorf("%w: data follows its end", ErrDamaged)
}
