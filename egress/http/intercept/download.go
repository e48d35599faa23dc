package intercept

import (
	"io"
	"math"
	"net/http"
	"sync"

	"github.com/doze-run/doze/problem"
)

const (
	// recordSize is the size limit of a TLS record (RFC 8446, section 5.1), and so the
	// largest piece that can arrive.
	recordSize = 16 << 10
	// readAheadAfter is the number of sent bytes after which the next piece of a body is
	// read while the last one is sent. For shorter bodies a goroutine is not worth its
	// cost.
	readAheadAfter = 256 << 10
	// maxAhead is the limit of bodies that are read ahead at a time. Each of them takes
	// an ahead and a gathering, 256 KiB. The other bodies are sent piece by piece.
	maxAhead = 256
)

// buffers hold bodies in transit: two TLS records, since most bodies are small or wait
// for data.
var buffers = sync.Pool{New: func() any { return new([2 * recordSize]byte) }}

// download is the body of a response on its way to the client.
type download struct {
	from  io.Reader
	to    http.ResponseWriter
	flush *http.ResponseController // nil: buffered bytes may wait for more
	wire  *wire                    // the client's connection; nil if other responses may share it
	// close interrupts a blocked Read of from. from is not read after run.
	close func() error
	ahead chan struct{} // has an element for each body that is read ahead
}

// run sends the body, and with flush each piece as it arrives. It returns nil at EOF, the
// error of reading the body, or a *Failure if the client has disconnected.
func (d *download) run() error {
	d.sendNow() // a client that waits for events needs the header first
	err := d.pieces(readAheadAfter)
	if err == nil {
		select {
		case d.ahead <- struct{}{}:
			err = d.readAhead()
			<-d.ahead
		default:
			err = d.pieces(math.MaxInt64)
		}
	}
	if err == io.EOF {
		return nil
	}
	return err
}

// pieces sends one piece after the other, up to about limit bytes. It returns the error
// that ended the body, including io.EOF, or nil if the body has not ended.
func (d *download) pieces(limit int64) error {
	buffer := buffers.Get().(*[2 * recordSize]byte)
	defer buffers.Put(buffer)
	for sent := int64(0); sent < limit; {
		n, err := d.from.Read(buffer[:])
		if n > 0 {
			if err := d.send(buffer[:n]); err != nil {
				return err
			}
			d.sendNow()
		}
		if err != nil {
			return err
		}
		sent += int64(n)
	}
	return nil
}

// send writes to the client.
func (d *download) send(b []byte) error {
	if _, err := d.to.Write(b); err != nil {
		return disconnected(err)
	}
	return nil
}

// disconnected is the failure of a request whose client has closed its connection.
func disconnected(err error) *Failure {
	return &Failure{Code: problem.ClientDisconnected, Reason: "the client closed the connection before the end of the response", Err: err}
}

// sendNow flushes written bytes to the client if flush is set. The next write returns any
// error.
func (d *download) sendNow() {
	if d.flush != nil {
		_ = d.flush.Flush()
	}
}

// readAhead sends the rest of the body, and reads each piece while the one before is
// sent.
func (d *download) readAhead() error {
	a := aheads.Get().(*ahead)
	defer aheads.Put(a)
	a.reset()
	var reading sync.WaitGroup
	reading.Go(func() { a.fill(d.from) }) // ends with the body, or with stop and close
	err := d.sendAll(a)
	if a.stop(); err != io.EOF {
		_ = d.close() // the rest is not needed
	}
	reading.Wait()
	return err
}

// sendAll sends the bytes that are read ahead as they arrive, and returns the error that
// ended the body. While more of it is available, writes are gathered.
func (d *download) sendAll(a *ahead) (err error) {
	if d.wire != nil {
		defer func() {
			if failed := d.wire.uncork(); failed != nil && err == io.EOF {
				err = disconnected(failed)
			}
		}()
	}
	for {
		b, err := a.next(false)
		if len(b) == 0 && err == nil {
			d.sendNow()
			if d.wire != nil {
				if err := d.wire.uncork(); err != nil {
					return disconnected(err)
				}
			}
			b, err = a.next(true)
		}
		if err != nil {
			return err
		}
		if d.wire != nil {
			d.wire.cork()
		}
		if err := d.send(b); err != nil {
			return err
		}
		a.consume(len(b))
	}
}
