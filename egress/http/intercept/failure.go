package intercept

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"syscall"
)

// Codes of requests that were sent on, or were to be, and came to nothing.
const (
	CodeUnreachable = "upstream_unreachable" // 502: no connection
	CodeTimeout     = "upstream_timeout"     // 502: no connection in time
	CodeCertificate = "upstream_certificate" // 502: it is not verifiably that host
	CodeTLS         = "upstream_tls"         // 502: no TLS with it
	CodeBroken      = "upstream_broken"      // 502: it ended, or answered with no HTTP
	CodeUnreadable  = "upstream_unreadable"  // 502: an answer in which no secret could be found
	CodeBody        = "client_body"          // 400: a body that is no HTTP
	CodeLeft        = "client_left"          // the client ended the request
)

// RefusedError is returned by a Dial or Attempt that does not want to connect.
type RefusedError struct {
	Status int // of the answer; 0 stands for 403
	Code   string
	Reason string
	Err    error // may be nil
}

func (e *RefusedError) Error() string { return e.Reason }
func (e *RefusedError) Unwrap() error { return e.Err }

// Failure is why a request was not answered, or not to its end. Its text may be
// shown to anybody: it has nothing that the host sent.
type Failure struct {
	Status int // that the client got; 0 if none
	Code   string
	Reason string
	Err    error // the cause, which may quote the host
}

func (e *Failure) Error() string { return e.Reason }
func (e *Failure) Unwrap() error { return e.Err }

// failed describes an error on the way to a host or back, if it is not described yet.
func failed(ctx context.Context, host string, err error) *Failure {
	if described := (*Failure)(nil); errors.As(err, &described) {
		return described
	}
	f := &Failure{Status: http.StatusBadGateway, Err: err}
	var (
		refused   *RefusedError
		unknown   *tls.CertificateVerificationError
		handshake *handshakeError
		dns       *net.DNSError
		op        *net.OpError
		timeout   net.Error
		errno     syscall.Errno
	)
	switch {
	case errors.As(err, &refused):
		f.Status, f.Code, f.Reason = cmp.Or(refused.Status, http.StatusForbidden), refused.Code, refused.Reason
	case errors.Is(ctx.Err(), context.Canceled):
		f.Status, f.Code, f.Reason = 0, CodeLeft, "the client ended the request"
	case errors.As(err, &unknown):
		f.Code, f.Reason = CodeCertificate, fmt.Sprintf("the certificate of %s cannot be verified: %s", host, certificateProblem(unknown.Err))
	case errors.As(err, &timeout) && timeout.Timeout(), errors.Is(err, context.DeadlineExceeded):
		f.Code, f.Reason = CodeTimeout, host+" did not answer in time"
	case errors.As(err, &handshake):
		f.Code, f.Reason = CodeTLS, "no TLS with "+host
		var alert tls.AlertError
		if errors.As(err, &alert) {
			f.Reason += ": it said " + alert.Error()
		}
	case errors.As(err, &dns):
		f.Code, f.Reason = CodeUnreachable, "the name "+host+" cannot be resolved"
	case errors.As(err, &op) && op.Op == "dial" && errors.As(err, &errno):
		f.Code, f.Reason = CodeUnreachable, fmt.Sprintf("no connection to %s: %s", host, errno)
	case errors.As(err, &op) && op.Op == "dial":
		f.Code, f.Reason = CodeUnreachable, "no connection to "+host
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		f.Code, f.Reason = CodeBroken, host+" ended the connection before its answer was complete"
	default:
		f.Code, f.Reason = CodeBroken, host+" did not answer as HTTP asks for"
	}
	return f
}

// certificateProblem says it without quoting the certificate, which anybody can
// have written.
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

// unreadable is an answer that a filter could not look at.
func unreadable(host, format string, args ...any) *Failure {
	return &Failure{Status: http.StatusBadGateway, Code: CodeUnreadable, Reason: "the answer of " + host + " " + fmt.Sprintf(format, args...)}
}
