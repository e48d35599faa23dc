package redact_test

import (
	"bytes"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"strings"
	"testing"

	"github.com/doze-run/doze/redact"
)

func TestTextKeepsWhatNamesTheSandboxAndDropsWhatGivesAccess(t *testing.T) {
	for in, want := range map[string]string{
		"3000-k3f9x2m7q1az-8d1f8d1f8d1f8d1f8d1f.preview.example.com": "3000-k3f9x2m7q1az-….preview.example.com",
		"3000-K3F9X2M7Q1AZ-8D1F8D1F8D1F8D1F8D1F.preview.example.com": "3000-K3F9X2M7Q1AZ-….preview.example.com",
		`no certificate for "3000-k3f9x2m7q1az-8d1f"`:                `no certificate for "3000-k3f9x2m7q1az-…"`,
		"3000-k3f9x2m7q1az.preview.example.com":                      "3000-k3f9x2m7q1az.preview.example.com",
		"Bearer doze_0123456789abcdefghijklmnopqrstuv":               "Bearer doze_…",
		"doze_preview":                            "doze_preview",
		`Get "https://a.test/x?key=1&b=2": EOF`:   `Get "https://a.test/x?…": EOF`,
		`dial "wss://a.test/x?key=1": EOF`:        `dial "wss://a.test/x?…": EOF`,
		"2026-11-22 is-a-date":                    "2026-11-22 is-a-date",
		"8d1f0c52-1234-5678-9abc-def012345678 id": "8d1f0c52-1234-5678-9abc-def012345678 id",
	} {
		if got := redact.Text(in); got != want {
			t.Errorf("Text(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestLibraryLogsConstantBeginningsOnly(t *testing.T) {
	const secret = "sk-canary-0123456789"
	var out bytes.Buffer
	l := log.New(redact.NewLibrary(slog.New(slog.NewTextHandler(&out, nil)), slog.LevelWarn), "", 0)
	l.Printf("Unsolicited response received on idle HTTP channel starting with %q; err=%v", secret, nil)
	l.Printf("http: TLS handshake error from 127.0.0.1:1: no certificate for %s", secret)
	l.Printf("something %s else", secret)
	l.Print(secret)
	text := out.String()
	if strings.Contains(text, secret) {
		t.Errorf("the log shows the secret:\n%s", text)
	}
	for _, want := range []string{"Unsolicited response received on idle HTTP channel", "http: TLS handshake error from", "library_message=unknown"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in\n%s", want, text)
		}
	}
}

func TestOneLibraryMessageDoesNotUseUpTheLinesOfAnother(t *testing.T) {
	var out bytes.Buffer
	l := log.New(redact.NewLibrary(slog.New(slog.NewTextHandler(&out, nil)), slog.LevelWarn), "", 0)
	for range 400 {
		l.Print("Unsolicited response received on idle HTTP channel starting with \"x\"")
	}
	l.Print("http2: header list too large")
	if n := strings.Count(out.String(), "Unsolicited"); n != 5 {
		t.Errorf("%d lines of one message, want 5", n)
	}
	if !strings.Contains(out.String(), "http2: header list too large") {
		t.Error("the other message is missing")
	}
}

func TestPanicShowsRuntimeErrorsAndNoOtherValue(t *testing.T) {
	caught := func(f func()) (v any) {
		defer func() { v = recover() }()
		f()
		return nil
	}
	var none []int
	if got := redact.Panic(caught(func() { _ = none[len(none)] })); !strings.Contains(got, "index out of range") {
		t.Errorf("a runtime error is %q", got)
	}
	for _, v := range []any{"sk-canary", errors.New("sk-canary"), fmt.Errorf("with %w", errors.New("sk-canary"))} {
		if got := redact.Panic(v); strings.Contains(got, "canary") {
			t.Errorf("%#v is %q", v, got)
		}
	}
}
