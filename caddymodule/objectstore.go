package caddymodule

import (
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strings"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"
	"github.com/minio/minio-go/v7/pkg/s3utils"

	"github.com/doze-run/doze/node"
	"github.com/doze-run/doze/runtime/backup"
	"github.com/doze-run/doze/runtime/bucket"
)

// ObjectStore is a bucket of an object store, and the credentials for it.
type ObjectStore struct {
	// The URL of an S3-compatible object store, such as `https://s3.eu-central-1.amazonaws.com`.
	Endpoint string `json:"endpoint,omitempty"`
	// The bucket, which must exist.
	Bucket string `json:"bucket,omitempty"`
	// The folder in the bucket, such as `doze/`. Nodes with the same folder share its content. Default: none.
	Prefix string `json:"prefix,omitempty"`
	// The region of the bucket. Default: the object store's.
	Region string `json:"region,omitempty"`
	// The id of the access key. The key must permit listing the bucket, and reading, writing and deleting objects.
	AccessKey string `json:"access_key,omitempty"`
	// The secret of the access key.
	SecretKey string `json:"secret_key,omitempty"`
}

// Backups is the configuration of the object store for backups of sandboxes.
type Backups struct {
	ObjectStore
	// The password from which the key of all backups is derived: at least 12 characters. The
	// password cannot be changed. Backups cannot be read without it.
	Password string `json:"password,omitempty"`
}

// Bucket is the configuration of a bucket that sandboxes may mount.
type Bucket struct {
	ObjectStore
	// Sandboxes cannot change the bucket. The key need not permit writing and deleting.
	ReadOnly bool `json:"read_only,omitempty"`
}

// minBackupPassword is the minimum length of a password in characters.
const minBackupPassword = 12

// storeOption is an option of a block for an object store.
type storeOption struct {
	name  string
	value *string
	want  string // remedy if the value is missing; empty: the option is optional
}

// options returns the options. variable is the beginning of the environment variables in messages.
func (s *ObjectStore) options(variable string) []storeOption {
	return []storeOption{
		{"endpoint", &s.Endpoint, "write it like https://s3.example.com"},
		{"bucket", &s.Bucket, "name the bucket"},
		{"prefix", &s.Prefix, ""},
		{"region", &s.Region, ""},
		{"access_key", &s.AccessKey, "write the id of the access key, or a placeholder such as {env." + variable + "_ACCESS_KEY}"},
		{"secret_key", &s.SecretKey, "write the secret of the access key, or a placeholder such as {env." + variable + "_SECRET_KEY}"},
	}
}

func (b *Backups) options() []storeOption {
	return append(b.ObjectStore.options("DOZE_BACKUP"),
		storeOption{"password", &b.Password, "write one with at least 12 characters, or a placeholder such as {env.DOZE_BACKUP_PASSWORD}"})
}

func (b *Bucket) options() []storeOption { return b.ObjectStore.options("DOZE_BUCKET") }

// validateStore returns an error for the first invalid option of the block. It ignores values that are not set or not known.
func (s *ObjectStore) validateStore(block string, known func(value string) bool) error {
	if s.Endpoint != "" && known(s.Endpoint) && !validEndpoint(s.Endpoint) {
		// The URL may contain a password, so it is not repeated.
		return fmt.Errorf("%s: invalid endpoint; write a URL without user, path and query, like https://s3.example.com", block)
	}
	if known(s.Bucket) && strings.Contains(s.Bucket, "/") {
		return fmt.Errorf("%s: bucket is %q; write the name of the bucket, and a folder in it as prefix", block, s.Bucket)
	}
	// The clients of the helpers refuse other names, in each request.
	if known(s.Bucket) && s.Bucket != "" && s3utils.CheckValidBucketName(s.Bucket) != nil {
		return fmt.Errorf("%s: bucket is %q; a bucket's name has 3 to 63 letters, digits, dots and hyphens, and a letter or digit at both ends", block, s.Bucket)
	}
	if known(s.Prefix) && strings.HasPrefix(s.Prefix, "/") {
		return fmt.Errorf("%s: prefix is %q; write it without the first slash", block, s.Prefix)
	}
	return nil
}

func (b *Backups) validateBackups(known func(value string) bool) error {
	if err := b.validateStore("backups", known); err != nil {
		return err
	}
	if n := utf8.RuneCountInString(b.Password); n > 0 && n < minBackupPassword && known(b.Password) {
		return fmt.Errorf("backups: password has %d characters; use at least %d", n, minBackupPassword)
	}
	return nil
}

// always reports every value as known.
func always(string) bool { return true }

// settings returns the configuration with its placeholders replaced, or an error if it is invalid. Errors do not
// contain secrets.
func (b *Backups) settings() (*node.Backups, error) {
	if b == nil {
		return nil, nil
	}
	expanded := *b
	if err := expandOptions("backups", expanded.options()); err != nil {
		return nil, err
	}
	if err := expanded.validateBackups(always); err != nil {
		return nil, err
	}
	return &node.Backups{
		ObjectStore: backup.ObjectStore{
			Endpoint: strings.TrimSuffix(expanded.Endpoint, "/"), Region: expanded.Region, Bucket: expanded.Bucket, Prefix: folder(expanded.Prefix),
			AccessKey: expanded.AccessKey, SecretKey: expanded.SecretKey,
		},
		Password: expanded.Password,
	}, nil
}

// bucketSettings returns the buckets with their placeholders replaced, or an error if one is invalid. Errors do not
// contain secrets.
func (a *App) bucketSettings() (map[string]bucket.Bucket, error) {
	buckets := map[string]bucket.Bucket{}
	for name, b := range a.Buckets {
		block := fmt.Sprintf("bucket %q", name)
		if err := checkBucketName(name); err != nil {
			return nil, err
		}
		expanded := *b
		if err := expandOptions(block, expanded.options()); err != nil {
			return nil, err
		}
		if err := expanded.validateStore(block, always); err != nil {
			return nil, err
		}
		buckets[name] = bucket.Bucket{
			Endpoint: strings.TrimSuffix(expanded.Endpoint, "/"), Region: expanded.Region, Bucket: expanded.Bucket, Prefix: folder(expanded.Prefix),
			AccessKey: expanded.AccessKey, SecretKey: expanded.SecretKey, ReadOnly: expanded.ReadOnly,
		}
	}
	return buckets, nil
}

// bucketName matches the names of buckets. They contain no slash, because doze mount add separates the prefix with one.
var bucketName = regexp.MustCompile(`\A[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?\z`)

func checkBucketName(name string) error {
	if !bucketName.MatchString(name) {
		return fmt.Errorf("bucket %q: invalid name; use 1 to 63 of a-z, 0-9, dot, hyphen and underscore, with a letter or digit at both ends", name)
	}
	return nil
}

// folder returns a prefix that is empty or ends in a slash.
func folder(prefix string) string {
	if prefix != "" && !strings.HasSuffix(prefix, "/") {
		prefix += "/"
	}
	return prefix
}

// placeholder matches a value that is one placeholder and nothing else.
var placeholder = regexp.MustCompile(`\A\{(env|file)\.[^{}]*\}\z`)

// expandOptions replaces Caddy's placeholders in the options of a block, and returns an error for the first required
// option that is missing.
func expandOptions(block string, options []storeOption) error {
	for _, o := range options {
		expanded, err := caddy.NewReplacer().ReplaceOrErr(*o.value, true, true)
		switch {
		case err == nil:
			*o.value = expanded
		case placeholder.MatchString(*o.value): // so the value is not a secret itself
			return fmt.Errorf("%s: %s is %s, which is missing or empty", block, o.name, *o.value)
		default:
			// Caddy's error may contain a part of a secret.
			return fmt.Errorf("%s: %s has a placeholder that is unknown or empty; write \\{ for a brace", block, o.name)
		}
	}
	return checkRequired(block, options)
}

// checkRequired returns an error for the first required option that is missing.
func checkRequired(block string, options []storeOption) error {
	for _, o := range options {
		if o.want != "" && *o.value == "" {
			return fmt.Errorf("%s: %s is missing; %s", block, o.name, o.want)
		}
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
	fields := b.ObjectStore.fields()
	fields["password"] = secret{&b.Password}
	return parseStore(o, "backups", fields, func() error { return b.validateBackups(hasNoPlaceholder) }, func() error { return checkRequired("backups", b.options()) })
}

// parseBucket parses a bucket that sandboxes may mount. The comment of parseApp documents the syntax.
func (a *App) parseBucket(o options) error {
	var name string
	if !o.AllArgs(&name) {
		return o.ArgErr()
	}
	if err := checkBucketName(name); err != nil {
		return o.WrapErr(err)
	}
	b, block := new(Bucket), fmt.Sprintf("bucket %q", name)
	if err := setOnce(o.Dispenser, &a.Buckets, block, name, b); err != nil {
		return err
	}
	fields := b.ObjectStore.fields()
	fields["read_only"] = &b.ReadOnly
	return parseStore(o, "bucket", fields, func() error { return b.validateStore(block, hasNoPlaceholder) }, func() error { return checkRequired(block, b.options()) })
}

// fields returns the options for options.read.
func (s *ObjectStore) fields() map[string]any {
	return map[string]any{
		"endpoint": &s.Endpoint, "bucket": &s.Bucket, "prefix": &s.Prefix, "region": &s.Region,
		"access_key": secret{&s.AccessKey}, "secret_key": secret{&s.SecretKey},
	}
}

// parseStore parses a block for an object store. It calls check after each option, so that an error is in its line,
// and complete after the last one.
func parseStore(o options, name string, fields map[string]any, check, complete func() error) error {
	block := options{Dispenser: o.Dispenser, seen: map[string]bool{}}
	for nesting := o.Nesting(); o.NextBlock(nesting); {
		if err := block.read(name, fields); err != nil {
			return err
		}
		if err := check(); err != nil {
			return o.WrapErr(err)
		}
	}
	if err := complete(); err != nil {
		return o.WrapErr(err)
	}
	return nil
}
