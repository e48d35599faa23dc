// Drives `doze exec` as programs do: node exec.mjs DOZE SANDBOX
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { strict as assert } from 'node:assert';
import { createInterface } from 'node:readline';

const [doze, sandbox] = process.argv.slice(2);
const start = (...command) => spawn(doze, ['exec', sandbox, '--', ...command], { stdio: ['pipe', 'pipe', 'inherit'] });

// Input that stays open does not keep the command from running.
{
  const p = start('sh', '-c', 'echo up; exit 3');
  const [out] = await once(p.stdout, 'data');
  assert.equal(out.toString(), 'up\n');
  const [code] = await once(p, 'close');
  assert.equal(code, 3);
}

// An interpreter answers line by line.
{
  const p = start('python3', '-uc', 'import sys\nfor line in sys.stdin: print(eval(line))');
  const answers = createInterface({ input: p.stdout })[Symbol.asyncIterator]();
  for (let i = 0; i < 20; i++) {
    p.stdin.write(`${i} * 7\n`);
    assert.equal((await answers.next()).value, String(i * 7));
  }
  p.stdin.end();
  const [code] = await once(p, 'close');
  assert.equal(code, 0);
}

// Bytes are bytes, in chunks of any size.
{
  const every = Buffer.alloc(256 * 1000, Buffer.from(Array.from({ length: 256 }, (_, i) => i)));
  const p = start('cat');
  const chunks = [];
  p.stdout.on('data', (chunk) => chunks.push(chunk));
  for (let at = 0; at < every.length; at += 9973) p.stdin.write(every.subarray(at, at + 9973));
  p.stdin.end();
  const [code] = await once(p, 'close');
  assert.equal(code, 0);
  assert.ok(Buffer.concat(chunks).equals(every));
}
console.log('ok');
