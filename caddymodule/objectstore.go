package caddymodule

import (
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strings"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"

	"github.com/doze-run/doze/node"
	"github.com/doze-run/doze/runtime/backup"
)

// Backups is the configuration of the object store for backups of sandboxes.
type Backups struct {
	// The URL of an S3-compatible object store, such as `https://s3.eu-central-1.amazonaws.com`.
	Endpoint string `json:"endpoint,omitempty"`
	// The bucket, which must exist.
	Bucket string `json:"bucket,omitempty"`
	// The folder in the bucket, such as `doze/`. Nodes with the same folder share a repository.
	// Default: none.
	Prefix string `json:"prefix,omitempty"`
	// The region of the bucket. Default: the object store's.
	Region string `json:"region,omitempty"`
	// The id of the access key. The key must permit listing the bucket, and reading, writing and deleting objects.
	AccessKey string `json:"access_key,omitempty"`
	// The secret of the access key.
	SecretKey string `json:"secret_key,omitempty"`
	// The password from which the key of all backups is derived: at least 12 characters. The
	// password cannot be changed. Backups cannot be read without it.
	Password string `json:"password,omitempty"`
}

// minBackupPassword is the minimum length of a password in characters.
const minBackupPassword = 12

// settings returns the configuration with its placeholders replaced, or an error if it is invalid. Errors do not
// contain secrets.
func (b *Backups) settings() (*node.Backups, error) {
	if b == nil {
		return nil, nil
	}
	expanded := *b
	for _, o := range []struct {
		name  string
		value *string
	}{
		{"endpoint", &expanded.Endpoint}, {"bucket", &expanded.Bucket}, {"prefix", &expanded.Prefix}, {"region", &expanded.Region},
		{"access_key", &expanded.AccessKey}, {"secret_key", &expanded.SecretKey}, {"password", &expanded.Password},
	} {
		if err := expand(o.name, o.value); err != nil {
			return nil, err
		}
	}
	if err := expanded.checkRequired(); err != nil {
		return nil, err
	}
	if err := expanded.checkValues(func(string) bool { return true }); err != nil {
		return nil, err
	}
	prefix := expanded.Prefix
	if prefix != "" && !strings.HasSuffix(prefix, "/") {
		prefix += "/"
	}
	return &node.Backups{
		ObjectStore: backup.ObjectStore{
			Endpoint: strings.TrimSuffix(expanded.Endpoint, "/"), Region: expanded.Region, Bucket: expanded.Bucket, Prefix: prefix,
			AccessKey: expanded.AccessKey, SecretKey: expanded.SecretKey,
		},
		Password: expanded.Password,
	}, nil
}

// placeholder matches a value that is one placeholder and nothing else.
var placeholder = regexp.MustCompile(`\A\{(env|file)\.[^{}]*\}\z`)

// expand replaces Caddy's placeholders in an option.
func expand(option string, value *string) error {
	expanded, err := caddy.NewReplacer().ReplaceOrErr(*value, true, true)
	switch {
	case err == nil:
		*value = expanded
		return nil
	case placeholder.MatchString(*value): // so the value is not a secret itself
		return fmt.Errorf("backups: %s is %s, which is missing or empty", option, *value)
	}
	// Caddy's error may contain a part of a secret.
	return fmt.Errorf("backups: %s has a placeholder that is unknown or empty; write \\{ for a brace", option)
}

// checkRequired returns an error for the first required option that is missing.
func (b *Backups) checkRequired() error {
	for _, o := range []struct{ option, value, want string }{
		{"endpoint", b.Endpoint, "write it like https://s3.example.com"},
		{"bucket", b.Bucket, "name the bucket"},
		{"access_key", b.AccessKey, "write the id of the access key, or a placeholder such as {env.DOZE_BACKUP_ACCESS_KEY}"},
		{"secret_key", b.SecretKey, "write the secret of the access key, or a placeholder such as {env.DOZE_BACKUP_SECRET_KEY}"},
		{"password", b.Password, "write one with at least 12 characters, or a placeholder such as {env.DOZE_BACKUP_PASSWORD}"},
	} {
		if o.value == "" {
			return fmt.Errorf("backups: %s is missing; %s", o.option, o.want)
		}
	}
	return nil
}

// checkValues returns an error for the first invalid option. It ignores values that are not set or not known.
func (b *Backups) checkValues(known func(value string) bool) error {
	if b.Endpoint != "" && known(b.Endpoint) && !validEndpoint(b.Endpoint) {
		// The URL may contain a password, so it is not repeated.
		return errors.New("backups: invalid endpoint; write a URL without user, path and query, like https://s3.example.com")
	}
	if known(b.Bucket) && strings.Contains(b.Bucket, "/") {
		return fmt.Errorf("backups: bucket is %q; write the name of the bucket, and a folder in it as prefix", b.Bucket)
	}
	if known(b.Prefix) && strings.HasPrefix(b.Prefix, "/") {
		return fmt.Errorf("backups: prefix is %q; write it without the first slash", b.Prefix)
	}
	if n := utf8.RuneCountInString(b.Password); n > 0 && n < minBackupPassword && known(b.Password) {
		return fmt.Errorf("backups: password has %d characters; use at least %d", n, minBackupPassword)
	}
	return nil
}

// checkArchiveAfter refuses to archive sandboxes without an object store.
func (a *App) checkArchiveAfter() error {
	if a.ArchiveAfter != nil && *a.ArchiveAfter > 0 && a.Backups == nil {
		return errors.New("archive_after requires an object store; configure one with backups")
	}
	return nil
}

// hasNoPlaceholder reports whether a value is known before the node runs.
func hasNoPlaceholder(value string) bool { return !strings.Contains(value, "{") }

func validEndpoint(text string) bool {
	u, err := url.Parse(text)
	return err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Hostname() != "" && u.User == nil &&
		(u.Path == "" || u.Path == "/") && u.RawQuery == "" && !u.ForceQuery && u.Fragment == ""
}

// parseBackups parses the object store for backups. The comment of parseApp documents the syntax.
func (a *App) parseBackups(o options) error {
	if a.Backups != nil {
		return o.Err("backups is already set; put all of it into one block")
	}
	if o.NextArg() {
		return o.ArgErr()
	}
	b := new(Backups)
	a.Backups = b
	fields := map[string]any{
		"endpoint": &b.Endpoint, "bucket": &b.Bucket, "prefix": &b.Prefix, "region": &b.Region,
		"access_key": secret{&b.AccessKey}, "secret_key": secret{&b.SecretKey}, "password": secret{&b.Password},
	}
	block := options{Dispenser: o.Dispenser, seen: map[string]bool{}}
	for nesting := o.Nesting(); o.NextBlock(nesting); {
		if err := block.read("backups", fields); err != nil {
			return err
		}
		// The previous options were valid, so the error is in this line.
		if err := b.checkValues(hasNoPlaceholder); err != nil {
			return o.WrapErr(err)
		}
	}
	if err := b.checkRequired(); err != nil {
		return o.WrapErr(err)
	}
	return nil
}
