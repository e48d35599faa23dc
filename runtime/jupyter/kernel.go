// Package jupyter runs code in a kernel of the Jupyter protocol, which executes it in a
// sandbox and is not trusted: whatever it sends is bounded in size and count.
package jupyter

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/doze-run/doze/runtime/jupyter/zmtp"
)

// Ports of a kernel on the loopback of its sandbox.
type Ports struct {
	Shell     uint16 `json:"shell_port"`
	IOPub     uint16 `json:"iopub_port"`
	Stdin     uint16 `json:"stdin_port"`
	Control   uint16 `json:"control_port"`
	Heartbeat uint16 `json:"hb_port"`
}

// Connection is what a client needs to know of a kernel.
type Connection struct {
	Ports
	Key string `json:"key"` // signs all messages
}

// NewConnection returns a connection with a random key.
func NewConnection(ports Ports) Connection { return Connection{Ports: ports, Key: rand.Text()} }

// File returns the connection file that the kernel reads when it starts.
func (c Connection) File() []byte {
	b, err := json.Marshal(struct {
		Connection
		Transport string `json:"transport"`
		IP        string `json:"ip"`
		Scheme    string `json:"signature_scheme"`
		Name      string `json:"kernel_name"`
	}{c, "tcp", "127.0.0.1", "hmac-sha256", "doze"})
	if err != nil {
		panic(err) // of strings and numbers
	}
	return b
}

// Dial opens a connection to a port of the kernel.
type Dial func(ctx context.Context, port uint16) (net.Conn, error)

// ErrLost means that the connection to the kernel has ended, and with it what was known of
// the code that it executes.
var ErrLost = errors.New("lost the connection to the kernel")

const (
	// subscribePause is how long the kernel may take to publish the first message to a new
	// subscriber before it is asked for another.
	subscribePause = 100 * time.Millisecond
	// lastMessage is how long an execution waits for the last of the messages that end it: the
	// kernel has dropped it, or it was too large.
	lastMessage = 2 * time.Second
	// endPause is how long one of the two connections may be read after the end of the other.
	endPause = 200 * time.Millisecond
	// publishQueue is how many messages ZeroMQ queues for a subscriber; it drops more without a
	// trace.
	publishQueue = 1000
	// maxUnrelated bounds the messages before the reply to an interrupt.
	maxUnrelated = 16
)

// Kernel is a client of a kernel, which executes one piece of code after the other.
type Kernel struct {
	connection Connection
	key        Signer
	dial       Dial
	limits     zmtp.Limits
	session    string
	shell      *zmtp.Conn
	iopub      *zmtp.Conn
	slot       chan struct{} // holds one element while code is executed
	done       chan struct{} // closed when the connection has ended
	readers    sync.WaitGroup
	ended      atomic.Int32 // readers that have ended

	mu      sync.Mutex // guards:
	current *Execution
	info    infoRequest
	err     error // with which the connection has ended
}

// infoRequest is the request that finds out whether the kernel responds.
type infoRequest struct {
	id                 string
	replied, published chan struct{} // closed when the response has arrived
}

// Connect connects to a kernel and returns when it responds, which it does not while it
// executes code for an earlier client. An error of dial is wrapped.
func Connect(ctx context.Context, c Connection, dial Dial, limits zmtp.Limits) (*Kernel, error) {
	k := &Kernel{
		connection: c, key: Signer(c.Key), dial: dial, limits: limits, session: rand.Text(),
		slot: make(chan struct{}, 1), done: make(chan struct{}),
	}
	var err error
	if k.shell, err = open(ctx, dial, c.Shell, zmtp.Dealer, limits); err != nil {
		return nil, err
	}
	if k.iopub, err = open(ctx, dial, c.IOPub, zmtp.Subscribe, limits); err != nil {
		k.shell.Close()
		return nil, err
	}
	k.readers.Add(2)
	go k.read(k.shell, k.onShell) // ended by disconnect
	go k.read(k.iopub, k.onIOPub)
	if err := k.subscribe(ctx); err != nil {
		k.Close()
		return nil, err
	}
	return k, nil
}

func open(ctx context.Context, dial Dial, port uint16, socket zmtp.Socket, limits zmtp.Limits) (*zmtp.Conn, error) {
	conn, err := dial(ctx, port)
	if err != nil {
		return nil, err
	}
	return zmtp.Open(ctx, conn, socket, limits)
}

// subscribe returns when the kernel has replied and its publications arrive.
func (k *Kernel) subscribe(ctx context.Context) error {
	const everything = "\x01" // a subscription to the empty prefix
	if err := k.iopub.Write(ctx, []byte(everything)); err != nil {
		return err
	}
	for {
		info := infoRequest{id: rand.Text(), replied: make(chan struct{}), published: make(chan struct{})}
		k.mu.Lock()
		k.info = info
		k.mu.Unlock()
		if err := k.request(ctx, info.id, typeKernelInfo, struct{}{}); err != nil {
			return err
		}
		if err := k.await(ctx, info.replied, nil); err != nil {
			return err
		}
		again := time.NewTimer(subscribePause)
		err := k.await(ctx, info.published, again.C)
		again.Stop()
		if err != errAgain {
			return err
		}
	}
}

var errAgain = errors.New("not yet")

// await waits until arrived is closed, or returns errAgain when again receives.
func (k *Kernel) await(ctx context.Context, arrived <-chan struct{}, again <-chan time.Time) error {
	select {
	case <-arrived:
		return nil
	case <-again:
		return errAgain
	case <-ctx.Done():
		return ctx.Err()
	case <-k.done:
		return k.lost()
	}
}

// Done is closed when the connection has ended.
func (k *Kernel) Done() <-chan struct{} { return k.done }

// Close ends the connection, and with it an execution in progress; the kernel goes on.
func (k *Kernel) Close() {
	k.disconnect(net.ErrClosed)
	k.readers.Wait()
}

// lost returns the error of a connection that has ended.
func (k *Kernel) lost() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return fmt.Errorf("%w: %w", ErrLost, k.err)
}

// disconnect ends the connection.
func (k *Kernel) disconnect(err error) {
	k.mu.Lock()
	if k.err == nil {
		k.err = err
		close(k.done)
		k.shell.Close()
		k.iopub.Close()
	}
	k.mu.Unlock()
}

func (k *Kernel) request(ctx context.Context, id, kind string, content any) error {
	b, err := json.Marshal(content)
	if err != nil {
		return err
	}
	frames, err := k.key.Encode(Message{Header: NewHeader(id, k.session, kind), Content: b})
	if err != nil {
		return err
	}
	if err := k.shell.Write(ctx, frames...); err != nil {
		if ctx.Err() == nil {
			k.disconnect(err)
			return k.lost()
		}
		k.disconnect(err) // the request may have been sent in part
		return ctx.Err()
	}
	return nil
}

// read reads messages until the connection ends.
func (k *Kernel) read(conn *zmtp.Conn, on func(Message) error) {
	defer k.readers.Done()
	for {
		frames, err := conn.Read()
		if err == zmtp.ErrTooLarge || conn.Delayed() > publishQueue {
			k.truncate()
		}
		if err == zmtp.ErrTooLarge {
			continue
		}
		var m Message
		if err == nil {
			m, _, err = k.key.Decode(frames)
		}
		if err == nil {
			err = on(m)
		}
		if err != nil {
			conn.Release()
			if k.ended.Add(1) == 1 && isEOF(err) {
				// The other connection may still have messages from before the end.
				time.AfterFunc(endPause, func() { k.disconnect(err) })
				return
			}
			k.disconnect(err)
			return
		}
	}
}

func isEOF(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET)
}

// truncate marks the output of the execution in progress.
func (k *Kernel) truncate() {
	k.mu.Lock()
	x := k.current
	k.mu.Unlock()
	if x != nil {
		x.truncate()
	}
}

// executionOf returns the execution that m belongs to, or nil.
func (k *Kernel) executionOf(m Message) *Execution {
	k.mu.Lock()
	defer k.mu.Unlock()
	if x := k.current; x != nil && m.Parent.ID != "" && (m.Parent.ID == x.id || m.Parent.ID == x.flush) {
		return x
	}
	return nil
}

// arrived closes the channel of the info request that m responds to.
func (k *Kernel) arrived(m Message, of func(infoRequest) chan struct{}) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if m.Parent.ID == "" || k.info.id != m.Parent.ID {
		return
	}
	select {
	case <-of(k.info):
	default:
		close(of(k.info))
	}
}

func (k *Kernel) onShell(m Message) error {
	switch m.Header.Type {
	case typeKernelInfoReply:
		k.arrived(m, func(r infoRequest) chan struct{} { return r.replied })
	case typeExecuteReply:
		if x := k.executionOf(m); x != nil {
			return x.onReply(m)
		}
	}
	return nil
}

func (k *Kernel) onIOPub(m Message) error {
	k.arrived(m, func(r infoRequest) chan struct{} { return r.published })
	if x := k.executionOf(m); x != nil {
		return x.onPublished(m)
	}
	return nil
}

// Interrupt calls Interrupt of the code that the kernel executes for this client, if there is any.
func (k *Kernel) Interrupt(ctx context.Context) error {
	k.mu.Lock()
	x := k.current
	k.mu.Unlock()
	if x == nil {
		return nil
	}
	return x.Interrupt(ctx)
}

// Interrupt makes a kernel interrupt what it executes for any client, and returns when it has
// received the request. A kernel receives it while it executes code.
func Interrupt(ctx context.Context, c Connection, dial Dial, limits zmtp.Limits) error {
	conn, err := open(ctx, dial, c.Control, zmtp.Dealer, limits)
	if err != nil {
		return err
	}
	defer conn.Release()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	id, key := rand.Text(), Signer(c.Key)
	frames, err := key.Encode(Message{Header: NewHeader(id, rand.Text(), typeInterrupt), Content: []byte("{}")})
	if err != nil {
		return err
	}
	if err := conn.Write(ctx, frames...); err != nil {
		return err
	}
	for range maxUnrelated {
		frames, err := conn.Read()
		if err != nil {
			return cmp.Or(ctx.Err(), err)
		}
		m, _, err := key.Decode(frames)
		if err != nil {
			return err
		}
		if m.Header.Type == typeInterruptReply && m.Parent.ID == id {
			return nil
		}
	}
	return fmt.Errorf("%w: no reply to an interrupt", ErrMalformed)
}
