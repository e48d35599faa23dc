package intercept

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"syscall"

	"golang.org/x/net/http2"

	"github.com/doze-run/doze/problem"
)

// Failure is the reason for which a request got no response, or only a part of one. Its
// text can be shown to the client: it quotes nothing that the upstream sent. It may be the
// error of a Dial or of reading a request's body.
type Failure struct {
	// Code of the refusal, if the response had not begun. The client gets no refusal
	// with ClientDisconnected.
	Code   problem.Code
	Reason string
	Err    error // the cause, which may quote the upstream; may be nil
	// Denied reports that the request was not allowed, and has not failed.
	Denied bool
}

func (e *Failure) Error() string { return e.Reason }
func (e *Failure) Unwrap() error { return e.Err }

// failed returns the *Failure for an error of sending a request or receiving its
// response. It returns a copy of an existing *Failure.
func failed(ctx context.Context, host string, err error) *Failure {
	if described, ok := errors.AsType[*Failure](err); ok {
		return new(*described)
	}
	f := &Failure{Err: err}
	var (
		unknown   *tls.CertificateVerificationError
		handshake *handshakeError
		dns       *net.DNSError
		op        *net.OpError
		timeout   net.Error
		errno     syscall.Errno
		reset     http2.StreamError
	)
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		return disconnected(err)
	case errors.As(err, &unknown):
		f.Code, f.Reason = problem.UpstreamCertificateInvalid, fmt.Sprintf("the certificate of %s cannot be verified: %s", host, certificateProblem(unknown.Err))
	case errors.As(err, &timeout) && timeout.Timeout(), errors.Is(err, context.DeadlineExceeded):
		f.Code, f.Reason = problem.UpstreamTimeout, host+" did not respond in time"
	case errors.As(err, &handshake):
		f.Code, f.Reason = problem.UpstreamTLSFailed, "the TLS handshake with "+host+" failed"
		var alert tls.AlertError
		if errors.As(err, &alert) {
			f.Reason += ": its alert is " + alert.Error()
		}
	case errors.As(err, &dns):
		f.Code, f.Reason = problem.UpstreamUnreachable, "the name "+host+" cannot be resolved"
	case errors.As(err, &op) && op.Op == "dial" && errors.As(err, &errno):
		f.Code, f.Reason = problem.UpstreamUnreachable, fmt.Sprintf("no connection to %s: %s", host, errno)
	case errors.As(err, &op) && op.Op == "dial":
		f.Code, f.Reason = problem.UpstreamUnreachable, "no connection to "+host
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE),
		errors.As(err, &reset):
		f.Code, f.Reason = problem.UpstreamDisconnected, host+" closed the connection before its response was complete"
	default:
		f.Code, f.Reason = problem.UpstreamResponseInvalid, "the response of "+host+" is not valid HTTP"
	}
	return f
}

// certificateProblem returns a reason that does not quote the certificate, whose text an
// attacker may have chosen.
func certificateProblem(err error) string {
	var (
		authority x509.UnknownAuthorityError
		name      x509.HostnameError
		invalid   x509.CertificateInvalidError
	)
	switch {
	case errors.As(err, &authority):
		return "it is signed by an unknown authority"
	case errors.As(err, &name):
		return "it is for other names"
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return "it has expired or is not yet valid"
	}
	return "it is not valid"
}

// unreadable returns the failure of a response that a filter cannot read.
func unreadable(host, format string, args ...any) *Failure {
	return &Failure{Code: problem.UpstreamResponseUnreadable, Reason: "the response of " + host + " " + fmt.Sprintf(format, args...)}
}

// Refuse sends a problem as the response to a request that was not sent on. Headers
// that were set for another response are dropped.
//
// If the header of r may have secrets in it, the problem needs a RequestID: without
// one, the response has r's X-Request-Id.
func Refuse(w http.ResponseWriter, r *http.Request, why *problem.Problem) {
	clear(w.Header())
	why.Write(w, r)
}
