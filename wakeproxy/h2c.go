package wakeproxy

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"syscall"
	"time"

	"golang.org/x/net/http2"

	"github.com/doze-run/doze/runtime/sandbox"
)

// probeTimeout bounds the probe for HTTP/2. A server of HTTP/2 sends its SETTINGS
// immediately (RFC 9113, section 3.4).
const probeTimeout = 2 * time.Second

// maxProbeFrame is the limit of a frame unless the client's SETTINGS raise it (RFC
// 9113, section 4.2). The framer's own limit is 16 MiB, which it allocates as soon as a
// frame announces them, for each request that probes at that moment.
const maxProbeFrame = 16 << 10

// errHTTP2: the server speaks HTTP/2 without TLS, and the request was HTTP/1.1.
var errHTTP2 = errors.New("the server speaks HTTP/2")

// speaksH2C reports whether to send the request in HTTP/2: by the port's protocol,
// the result of an earlier probe, or the request's own form.
func (x *exchange) speaksH2C(req *http.Request) bool {
	switch x.port.Protocol {
	case sandbox.ProtocolHTTP1:
		return false
	case sandbox.ProtocolH2C:
		return true
	}
	if x.proxy.hosts.get(x.gateKey()).h2c {
		return true
	}
	kind := req.Header.Get("Content-Type")
	return req.ProtoMajor == 2 && strings.HasPrefix(kind, "application/grpc") && !strings.HasPrefix(kind, "application/grpc-web")
}

// foundH2C reports whether the server, which failed a request of HTTP/1.1 with err,
// speaks HTTP/2 instead. Such a server sends a frame or just closes the connection;
// which of the two arrives is a race, so it is probed, until one probe in this run of
// the container has had a result.
func (x *exchange) foundH2C(ctx context.Context, err error) bool {
	if ctx.Err() != nil || !maybeHTTP2(err) {
		return false
	}
	key := x.gateKey()
	if check := x.proxy.hosts.get(key); check.probed {
		return check.h2c
	}
	h2c, conclusive := x.probeH2C(ctx)
	if conclusive {
		x.proxy.hosts.update(key, func(check hostCheck) hostCheck {
			check.probed, check.h2c = true, h2c
			return check
		})
	}
	return h2c
}

// maybeHTTP2 reports whether err may be what a server of HTTP/2 does to a new
// connection of HTTP/1.1.
func maybeHTTP2(err error) bool {
	// The second is net/http's error when a response precedes the request.
	return strings.Contains(err.Error(), "malformed HTTP") || strings.Contains(err.Error(), "readLoopPeekFailLocked") || hungUp(err)
}

// probeH2C begins a connection of HTTP/2 with prior knowledge (RFC 9113, section
// 3.3) and reports whether the server does the same. A server that sends nothing within
// probeTimeout does not. The probe is not conclusive when the visitor leaves before, or
// the server cannot be reached or hangs up, as one that restarts does.
func (x *exchange) probeH2C(visitor context.Context) (h2c, conclusive bool) {
	ctx, cancel := context.WithTimeout(visitor, probeTimeout)
	defer cancel()
	conn, err := dialSandbox(ctx, "", "")
	if err != nil {
		return false, false
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Now()) })
	defer stop()
	if _, err := conn.Write([]byte(http2.ClientPreface)); err != nil {
		return false, false
	}
	framer := http2.NewFramer(conn, conn)
	framer.SetMaxReadFrameSize(maxProbeFrame)
	if err := framer.WriteSettings(); err != nil {
		return false, false
	}
	frame, err := framer.ReadFrame()
	switch {
	case err == nil:
		_, h2c = frame.(*http2.SettingsFrame)
		return h2c, true
	case visitor.Err() != nil, errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET):
		return false, false
	}
	return false, true
}
