package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
)

func TestTables(t *testing.T) {
	before := func(d time.Duration) time.Time { return time.Now().Add(-d - d/100) }
	code := 0
	at := time.Date(2026, 11, 20, 12, 30, 0, 123e6, time.Local)
	port := types.Port{Port: 3000, URL: "https://3000-k3f9x2m7q1az-8d1f.preview.doze.localhost:8443/", Access: "token", Wake: "navigation", HostHeader: "auto", Protocol: "auto", WebSocket: "sleep"}
	open := types.Port{Port: 8080, URL: "https://8080-k3f9x2m7q1az.preview.doze.localhost:8443/", Access: "public", Wake: "any", HostHeader: "rewrite", Protocol: "h2c", WebSocket: "keep_awake"}
	web := types.Process{ID: "p-aaaaaa12", PID: 12, Name: "web", Argv: []string{"npm", "run", "dev"}, Restart: "on_wake", State: "running", StartedAt: before(3 * time.Hour)}
	done := types.Process{ID: "p-aaaaaaa9", PID: 9, Name: "build", Command: "make all", Restart: "never", State: "exited", ExitCode: &code, StartedAt: before(26 * time.Hour)}
	killed := types.Process{ID: "p-aaaaaa10", PID: 10, Name: "job", Command: "sleep 9", Restart: "never", State: "exited", ExitCode: &code, Signal: "SIGKILL", StartedAt: before(50 * time.Hour)}
	lost := types.Process{ID: "p-aaaaaa11", PID: 11, Name: "old", Command: "sleep 9", Restart: "always", State: "lost", StartedAt: before(5 * time.Second)}
	shop := types.Sandbox{ID: "k3f9x2m7q1az", Name: "shop", Image: "base", ImageRef: "localhost/doze/base:latest", Size: "basic", State: "asleep",
		StateSince: before(2 * time.Minute), StateReason: "idle", Condition: &types.Condition{Code: "wake_failed", Message: "it cannot be woken", Since: before(time.Minute)}, Env: map[string]string{"B": "2", "A": "1"}, Labels: map[string]string{"team": "web"},
		SleepAfter: types.Duration(time.Minute), StopAfter: types.Duration(24 * time.Hour), CreatedAt: before(72 * time.Hour), Persist: types.PersistDisk, TTL: types.Duration(96 * time.Hour), ExpiresAt: at.Add(24 * time.Hour),
		Usage: &types.Usage{CPUSeconds: 75.5, MemoryBytes: 150 << 20, DiskBytes: 236 << 20, Files: 20_412}, LastActiveAt: before(3 * time.Minute),
		Ports: []types.Port{port, open}, Processes: []types.Process{web, done}}
	bare := types.Sandbox{ID: "aaaaaaaaaaaa", Name: "a-longer-name", Image: "node", Size: "lite", State: "running", Persist: types.PersistMemory, StateSince: before(10 * time.Second), CreatedAt: before(10 * time.Second)}
	got := reading{Sandboxes: []types.Sandbox{bare, shop}, Node: types.Node{ID: "nnnnnnnnnnnn", StartedAt: before(5 * time.Hour),
		Engine: types.EngineStatus{OK: true}, Sandboxes: map[types.State]int{"asleep": 1, "running": 1}, Leases: 2}}
	events := []types.Event{
		{Type: "image_pull_progress", Time: at, Progress: "layer 3 of 7"},
		{Type: "created", Time: at, DurationMS: 140},
		{Type: "woke", Time: at, Kind: "warm", DurationMS: 0.26, Cause: "preview"},
		{Type: "slept", Time: at, Reason: "idle"},
		{Type: "memory_reclaimed", Time: at, DurationMS: 310, MemoryBefore: 232 << 20, MemoryAfter: 20 << 20},
		{Type: "stopped", Time: at, Reason: "memory_pressure", Detail: "0.8 GiB of 24 GiB of memory were available, 5% are required"},
		{Type: "stopped", Time: at, Reason: "disk_limit", Detail: "the sandbox used 10 GiB in 8120 files of disk; the limit of size basic is 10 GiB in 1000000 files",
			Disk: &types.DiskUsage{Bytes: 10<<30 + 4096, Files: 8120}, DiskLimit: &types.DiskUsage{Bytes: 10 << 30, Files: 1_000_000}},
		{Type: "process_exited", Time: at, Process: &killed},
		{Type: "port_exposed", Time: at, Port: 3000},
		{Type: "held", Time: at, Until: at.Add(time.Hour)},
		{Type: "woke", Time: at, Kind: "cold", DurationMS: 1830, Cause: "exec"},
		{Type: "snapshotted", Time: at, Snapshot: "s7k2m9x4q3bz", DurationMS: 2100, Bytes: 236 << 20},
		{Type: "forked", Time: at, Forks: 10, DurationMS: 3106, Bytes: 236 << 20},
		{Type: "snapshot_deleted", Time: at, Snapshot: "s7k2m9x4q3bz", Reason: "retention", Bytes: 236 << 20},
		{Type: "restored", Time: at, Snapshot: "bbbbbbbbbbbb", DurationMS: 310},
		{Type: "backed_up", Time: at, Backup: "b4n8r2t6w9xz", DurationMS: 4182, Bytes: 236 << 20, StoredBytes: 1258291},
		{Type: "backup_failed", Time: at, Error: "object store: connection refused"},
		{Type: "backup_deleted", Time: at, Backup: "b4n8r2t6w9xz", Reason: "retention", Bytes: 236 << 20},
		{Type: "restored", Time: at, Backup: "b4n8r2t6w9xz", DurationMS: 310, Bytes: 236 << 20},
		{Type: "archived", Time: at, Reason: "archive_after", Backup: "b4n8r2t6w9xz", DurationMS: 4182, Bytes: 236 << 20, StoredBytes: 1258291},
		{Type: "retrieved", Time: at, Backup: "b4n8r2t6w9xz", DurationMS: 2310, Bytes: 236 << 20},
		{Type: "mounted", Time: at, DurationMS: 12, Bucket: "datasets", Path: "/data"},
		{Type: "unmounted", Time: at, DurationMS: 3, Bucket: "datasets", Path: "/data"},
	}

	node := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		json.NewEncoder(w).Encode(map[string]any{"events": events, "processes": []types.Process{web, done, killed, lost}})
	}))
	defer node.Close()
	r := &rig{t: t, env: map[string]string{"DOZE_API": node.URL, "DOZE_TOKEN": "x", "DOZE_HOME": t.TempDir()}}
	api, err := client.New(client.Config{URL: node.URL})
	if err != nil {
		t.Fatal(err)
	}
	defer api.Close()

	printed := func(print func(a *app) error) string {
		var out bytes.Buffer
		if err := print(&app{out: &out}); err != nil {
			t.Error(err)
		}
		return out.String()
	}
	golden(t, "ls", printed(func(a *app) error { return a.printSandboxes([]types.Sandbox{shop, bare}) }))
	golden(t, "show", printed(func(a *app) error { return a.printSandbox(shop) }))
	golden(t, "top", printed(func(a *app) error {
		return (&top{node: api}).draw(context.Background(), a.out, got, 1)
	}))
	golden(t, "ps", r.ok("ps", "shop"))
	golden(t, "events", r.ok("events", "shop"))
	golden(t, "history", r.ok("history", "shop"))
	golden(t, "help", r.ok("--help"))
	golden(t, "df", printed(func(a *app) error {
		return a.printDiskUsage(types.NodeDiskUsage{
			FileSystems: []types.FileSystem{
				{Path: "/var/lib/doze/.local/share/containers/storage", TotalBytes: 100 << 30, UsedBytes: 30 << 30, OtherBytes: 25 << 30, FreeBytes: 70 << 30, ReserveBytes: 2 << 30},
				{Path: "/srv/doze/run", TotalBytes: 10 << 30, UsedBytes: 30 << 20, OtherBytes: 6 << 20, FreeBytes: 10<<30 - 30<<20, ReserveBytes: 512 << 20},
			},
			Sandboxes: types.DiskTotal{Count: 12, Bytes: 4 << 30}, Snapshots: types.DiskTotal{Count: 3, Bytes: 900 << 20}, UnusedSnapshots: types.DiskTotal{Count: 2, Bytes: 500 << 20},
			Bases: types.DiskTotal{Count: 1, Bytes: 236 << 20}, StoreBytes: 9 << 20, BackupCacheBytes: 15 << 20,
			LargestSandboxes: []types.SandboxDisk{
				{Name: "shop", State: types.StateAsleep, DiskBytes: 3 << 30, LimitBytes: 10 << 30, FreedBytes: 3<<30 + 236<<20, MeasuredAt: before(2 * time.Minute)},
				{Name: "a-longer-name", State: types.StateStopped, DiskBytes: 1 << 30, FreedBytes: 1 << 30},
			},
		})
	}))
}

func TestAnErrorOfTheNodeNamesTheRequest(t *testing.T) {
	status, code := 0, ""
	node := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(status)
		fmt.Fprintf(w, `{"status":%d,"code":%q,"title":"No","detail":"it is so","request_id":"KZ6U73GMTDT7NWRR"}`, status, code)
	}))
	defer node.Close()
	r := &rig{t: t, env: map[string]string{"DOZE_API": node.URL + "/api/v1", "DOZE_TOKEN": "x", "DOZE_HOME": t.TempDir()}}
	status, code = 503, "engine_unavailable"
	if got := r.doze("show", "a"); got.err != "doze: engine_unavailable: it is so\n  the node's log has more about request KZ6U73GMTDT7NWRR\n" {
		t.Errorf("got %q", got.err)
	}
	status, code = 404, "sandbox_not_found"
	if got := r.doze("show", "a"); strings.Contains(got.err, "KZ6U") {
		t.Errorf("got %q", got.err)
	}
}

func TestUnits(t *testing.T) {
	for want, got := range map[string]string{
		"0s": age(time.Millisecond), "59s": age(59*time.Second + 999*time.Millisecond), "2m": age(2*time.Minute + 59*time.Second),
		"47h": age(47*time.Hour + 59*time.Minute), "2d": age(48 * time.Hour), "400d": age(400 * 24 * time.Hour),
		"0 B": size(0), "1023 B": size(1023), "1.0 KiB": size(1024), "1.2 MiB": size(1258291), "1.0 MiB": size(1<<20 - 1), "5.0 TiB": size(5 << 40), "2048.0 PiB": size(1 << 61),
		"0.26ms": milliseconds(0.26), "42ms": milliseconds(42.4), "1.5s": milliseconds(1530),
		"never": span(0), "1m": span(time.Minute), "1m30s": span(90 * time.Second), "24h": span(24 * time.Hour), "1h30m": span(90 * time.Minute),
		"-": ago(time.Time{}),
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestEndsOfProcessesAreDescribedAlike(t *testing.T) {
	three := 3
	for want, got := range map[string]string{
		"running":          stateOrEnd(types.ProcessStateRunning, "", "", nil),
		"exited (3)":       stateOrEnd(types.ProcessStateExited, "", "", &three),
		"exited (SIGKILL)": processState(types.Process{State: types.ProcessStateExited, Signal: "SIGKILL", ExitCode: &three}),
		"lost (idle)":      stateOrEnd(types.ProcessStateLost, types.StateReasonIdle, "", nil),
		"lost (requested)": stateOrEnd(types.ProcessStateLost, types.StateReasonRequested, "SIGTERM", nil),
	} {
		if got != want {
			t.Errorf("got %q, not %q", got, want)
		}
	}
}
