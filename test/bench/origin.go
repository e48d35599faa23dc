package main

import (
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"github.com/doze-run/doze/testkit/testca"
)

// origin is the server outside of sandboxes that the figures of egress lead to,
// on the loopback, in a process of its own: HTTPS, and streams of bytes.
type origin struct {
	HTTPS string `json:"https"` // address
	Raw   string `json:"raw"`
	CA    string `json:"ca"` // PEM of the authority of its certificate

	cmd *exec.Cmd
}

// startOrigin starts it. The caller ends it.
func startOrigin(program string) (*origin, error) {
	o := &origin{cmd: inSession(exec.Command(program, "origin"))}
	o.cmd.Stderr = os.Stderr
	out, err := o.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if _, err := o.cmd.StdinPipe(); err != nil { // it ends when this is closed, as by our death
		return nil, err
	}
	if err := o.cmd.Start(); err != nil {
		return nil, err
	}
	if err := json.NewDecoder(out).Decode(o); err != nil {
		o.kill()
		return nil, fmt.Errorf("starting the origin: %w", err)
	}
	return o, nil
}

// local is its URL on the loopback, for which its certificate is valid.
func (o *origin) local() string { return localURL(o.HTTPS) }

func localURL(address string) string {
	_, port, _ := strings.Cut(address, ":")
	return "https://localhost:" + port + "/"
}

func (o *origin) kill() {
	_ = o.cmd.Process.Kill() // it may have ended
	_ = o.cmd.Wait()
}

// serveOrigin is the process: it prints its addresses on standard output, and ends
// with standard input.
func serveOrigin() error {
	certificate, ca, err := testca.New("localhost", "*.look.test", "*.pass.test")
	if err != nil {
		return err
	}
	secure, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{certificate}})
	if err != nil {
		return err
	}
	raw, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	go newServer(originRoutes()).Serve(secure) // both end with the process
	go serveRaw(raw)
	where := origin{HTTPS: secure.Addr().String(), Raw: raw.Addr().String(), CA: string(ca)}
	if err := json.NewEncoder(os.Stdout).Encode(where); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

func originRoutes() http.Handler {
	block := make([]byte, 1<<20)
	_, _ = rand.Read(block) // never fails
	mux := http.NewServeMux()
	mux.HandleFunc("/", servePage)
	mux.HandleFunc("/blob", func(w http.ResponseWriter, r *http.Request) {
		size, err := strconv.ParseInt(r.FormValue("bytes"), 10, 64)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Type", "application/octet-stream")
		w.Header().Set("Content-Length", strconv.FormatInt(size, 10))
		for size > 0 {
			n, err := w.Write(block[:min(size, int64(len(block)))])
			if err != nil {
				return
			}
			size -= int64(n)
		}
	})
	return mux
}

// Directions of a stream, as seen from the client, which sends one as the first
// byte: out, and then the server sends the count of bytes; or in.
const (
	streamOut = 'o'
	streamIn  = 'i'
)

// streamBuffer is the size of the writes and reads of both ends of a stream.
const streamBuffer = 256 << 10

func serveRaw(l net.Listener) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		go serveStream(conn.(*net.TCPConn)) // ends with its client
	}
}

func serveStream(conn *net.TCPConn) {
	defer conn.Close()
	buf := make([]byte, streamBuffer)
	if _, err := io.ReadFull(conn, buf[:1]); err != nil {
		return
	}
	if buf[0] == streamIn {
		for {
			if _, err := conn.Write(buf); err != nil {
				return
			}
		}
	}
	count, _ := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{conn}, buf) // until the client's end
	_, _ = conn.Write(binary.BigEndian.AppendUint64(nil, uint64(count)))
}
