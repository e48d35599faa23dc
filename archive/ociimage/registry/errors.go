package registry

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"path/filepath"

	"oras.land/oras-go/v2/registry/remote/auth"
	"oras.land/oras-go/v2/registry/remote/errcode"
)

// isTemporary reports whether the same upload can succeed later.
func isTemporary(err error) bool {
	if refused, ok := errors.AsType[*errcode.ErrorResponse](err); ok {
		return isTemporaryStatus(refused.StatusCode)
	}
	if response, ok := errors.AsType[*statusError](err); ok {
		return isTemporaryStatus(response.code)
	}
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || brokenConnection(err) != nil
}

func isTemporaryStatus(code int) bool { return code >= 500 || code == http.StatusTooManyRequests }

// brokenConnection returns the reason why an established connection broke off, without its addresses,
// or nil if err is another error.
func brokenConnection(err error) error {
	failed, ok := errors.AsType[*net.OpError](err)
	if !ok || failed.Op == "dial" {
		return nil
	}
	if inner := brokenConnection(failed.Err); inner != nil {
		return inner
	}
	return failed.Err
}

// explain returns err with the failed operation and what the user can do. URLs are
// omitted, because an upload's URL is long.
func (r *Repository) explain(what string, err error) error {
	if err == nil {
		return nil
	}
	if failed, ok := errors.AsType[*url.Error](err); ok {
		err = failed.Err
	}
	host := r.cfg.Reference.Registry
	refused, responded := errors.AsType[*errcode.ErrorResponse](err)
	distrusted, _ := errors.AsType[*tls.CertificateVerificationError](err)
	switch {
	case errors.Is(err, context.Canceled):
		return err
	case errors.Is(err, auth.ErrBasicCredentialNotFound), responded && (refused.StatusCode == http.StatusUnauthorized || refused.StatusCode == http.StatusForbidden):
		return fmt.Errorf("%s does not permit the push to %s: %s", host, r.cfg.Reference.Repository, r.credentialsRemedy())
	case responded:
		return fmt.Errorf("%s: status %d: %w", what, refused.StatusCode, causeOf(refused))
	case distrusted != nil:
		// Not wrapped: for the API's certificates, the client prints another remedy.
		return fmt.Errorf("the certificate of %s is not trusted: %v; store its certificate authority as %s, or use --tls-verify=false in a network that you trust",
			host, distrusted.Err, filepath.Join(userCertificates("~"), host, "ca.crt"))
	case errors.Is(err, http.ErrSchemeMismatch):
		return fmt.Errorf("%s speaks HTTP without encryption; use --tls-verify=false in a network that you trust", host)
	}
	if response, ok := errors.AsType[*statusError](err); ok && !isTemporaryStatus(response.code) {
		return fmt.Errorf("%s is not a registry: %w", host, err)
	}
	if broken := brokenConnection(err); broken != nil {
		err = fmt.Errorf("the connection broke off: %w", broken)
	}
	return fmt.Errorf("%s: %w", what, err)
}

// causeOf returns the registry's own message, or the status of its response.
func causeOf(refused *errcode.ErrorResponse) error {
	if len(refused.Errors) > 0 {
		return refused.Errors
	}
	return errors.New(http.StatusText(refused.StatusCode))
}

// credentialsRemedy returns which credentials were used, or where they were missing.
func (r *Repository) credentialsRemedy() string {
	login := "podman login " + r.cfg.Reference.Registry
	if r.found.file == "" {
		return fmt.Sprintf("no credentials for %s in %s; run `%s` or `docker login`", r.cfg.Reference.Registry, list(r.files), login)
	}
	user := r.found.Username
	if user == "" {
		user = "the token"
	} else {
		user = "user " + user
	}
	return fmt.Sprintf("it refused %s of %s; run `%s` with another account or password", user, r.found.file, login)
}
