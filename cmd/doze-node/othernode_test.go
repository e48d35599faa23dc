package main

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestANodeIsFoundByItsAdminSocket(t *testing.T) {
	folder := t.TempDir()
	if n := findNode(folder); n != nil {
		t.Errorf("without a socket: %+v", n)
	}
	listener, err := net.Listen("unix", filepath.Join(folder, "admin.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	n := findNode(folder)
	if n == nil || n.proc != fmt.Sprint("/proc/", os.Getpid()) || n.credential.Uid != uint32(os.Geteuid()) || n.credential.Gid != uint32(os.Getegid()) {
		t.Fatalf("got %+v", n)
	}
	if n.runsAsOther() {
		t.Error("it runs as this user")
	}
	if _, err := n.groups(); err != nil {
		t.Error(err)
	}
	n.credential.Uid++
	if !n.runsAsOther() {
		t.Error("it runs as another user")
	}
}

func TestDoctorHasTheEnvironmentOfTheRunningNode(t *testing.T) {
	proc := t.TempDir()
	for file, text := range map[string]string{
		"environ": "PATH=/bin\x00DOZE_CGROUP=/sys/fs/cgroup/doze\x00DOZE_HOME=/old\x00DOZE_TOKEN=old\x00",
		"status":  "Name:\tdoze-node\nUid:\t990\t990\t990\t990\nGroups:\t10 990 \n",
	} {
		if err := os.WriteFile(filepath.Join(proc, file), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	n := &runningNode{proc: proc}
	got, err := n.environment("/srv/node", []string{"PATH=/usr/sbin", "DOZE_TOKEN=new", "DOZE_CGROUP=/root", "SECRET=x", "HOME=/root"})
	want := []string{"PATH=/bin", "DOZE_CGROUP=/sys/fs/cgroup/doze", "DOZE_HOME=/old", "DOZE_TOKEN=old", "DOZE_HOME=/srv/node", "DOZE_TOKEN=new"}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %q, %v; want %q", got, err, want)
	}
	if groups, err := n.groups(); err != nil || !slices.Equal(groups, []uint32{10, 990}) {
		t.Errorf("got %v, %v", groups, err)
	}
}

func TestRootMakesNoStoreForAnotherUser(t *testing.T) {
	dir := t.TempDir()
	if os.Geteuid() == 0 {
		if err := os.Chown(dir, 65534, 65534); err != nil {
			t.Fatal(err)
		}
	}
	if err := checkOwner(0, dir, "doctor"); err == nil || !strings.Contains(err.Error(), "run this command as that user") {
		t.Errorf("got %v", err)
	}
	if err := checkOwner(1000, dir, "doctor"); err != nil {
		t.Error(err)
	}
	if err := checkOwner(0, "/", "doctor"); err != nil {
		t.Error(err)
	}
}
