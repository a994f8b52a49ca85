/** How the pages are built: relative addresses, content hashes, nothing that depends on place or time. */
import { resolve } from 'node:path';
import { svelte } from '@sveltejs/vite-plugin-svelte';
import { build } from 'vite';
import type { BuildOptions, Plugin } from 'vite';
import { defineConfig } from 'vitest/config';

const BASE = './';
const BUILD: BuildOptions = {
  target: 'es2022',
  modulePreload: { polyfill: false },
  reportCompressedSize: false,
};

/** The KV view is a build of its own in the same folder, so that the chat page carries nothing of it. */
function kvView(): Plugin {
  let outDir = '';
  return {
    name: 'kv-view',
    apply: 'build',
    configResolved: ({ root, build }) => void (outDir = resolve(root, build.outDir)),
    async closeBundle() {
      const rolldownOptions = { input: 'kv.html' };
      const beside = { outDir, emptyOutDir: false, copyPublicDir: false };
      await build({
        configFile: false,
        base: BASE,
        plugins: [svelte()],
        build: { ...BUILD, ...beside, rolldownOptions },
      });
    },
  };
}

export default defineConfig({
  base: BASE,
  plugins: [svelte(), kvView()],
  build: BUILD,
  server: {
    proxy: {
      '/v1': { target: 'http://127.0.0.1:8000', ws: true },
      '/health': 'http://127.0.0.1:8000',
    },
  },
  test: {
    environment: 'jsdom',
    include: ['src/**/*.test.ts'],
  },
});
